"""`/openapi.json` describes the server: it is generated from the routes and messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ingest.access.tokens import ERASING, PUBLISHING, SCOPES
from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS
from ingest.server.openapi import document
from ingest.server.route_table import EVERYWHERE, ROUTES
from tests.collector_process import CollectorProcess, declare


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def references(schema: Any) -> Iterator[str]:
    """Every `$ref` inside a document."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def test_every_route_is_described_with_its_statuses() -> None:
    """Each path and method, the success status of the route, and each code of its refusals."""
    paths = document("1")["paths"]
    assert {(m.upper(), p) for p, methods in paths.items() for m in methods} == {
        (route.method, route.path) for route in ROUTES
    }
    for route in ROUTES:
        responses = paths[route.path][route.method.lower()]["responses"]
        codes = {STATUS[code] for code in (*EVERYWHERE, *route.refuses)} | {404, 405}
        assert set(map(int, responses)) == codes | {route.status, *route.statuses}


def test_the_scopes_of_a_route_are_scopes_that_a_token_can_have() -> None:
    """A token needs one of them; what only local callers may do has no public scope name."""
    operations = [one for path in document("1")["paths"].values() for one in path.values()]
    named = {
        scope for one in operations for way in one["security"] for scope in way.get("token", ())
    }
    assert named == set(SCOPES)


def test_every_reference_leads_somewhere() -> None:
    """Messages are described once; all errors share one schema."""
    described = document("1")
    names = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    found = set(references(described))
    assert found <= names
    assert {
        f"#/components/schemas/{kind}" for kind in ("Batch", "LogAction", "ErrorReply")
    } <= found


def test_tuples_are_lists_of_a_fixed_length() -> None:
    starts = document("1")["components"]["schemas"]["Registered"]["properties"]["starts"]
    pair = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    assert starts["items"] == pair


def test_the_server_serves_it_and_every_path_of_it(collector: CollectorProcess) -> None:
    """The server knows every route of the document: GETs answer, POSTs name their missing input."""
    status, described = collector.get("/openapi.json")
    assert (status, described) == (200, msgspec.json.decode(msgspec.json.encode(document("0"))))
    for route in ROUTES:
        path = route.path.replace("{id}", "nobody")
        if route.method == "POST":
            status, answer = collector.post(path, [])
            expected = (403,) if route.needed in (PUBLISHING, ERASING) else (415, 422)
            assert status in expected, (path, answer)
        elif route.reply == wire.JSON:
            assert collector.get(path)[0] == 200, path


def test_an_error_has_the_shape_that_is_described(collector: CollectorProcess) -> None:
    for path in ("/v1/episodes/nobody", "/nowhere", "/v1/policies/x/weights"):
        status, answer = collector.get(path)
        assert status == 404
        msgspec.convert(answer, wire.ErrorReply, strict=True)
        assert set(answer["error"]) <= set(wire.ErrorBody.__struct_fields__)
