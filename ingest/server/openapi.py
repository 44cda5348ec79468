"""`/openapi.json`: the routes and the wire messages, as OpenAPI 3.1.

It is generated from `route_table.ROUTES`, the structs of `wire` and the codes of `errors`, which
the server itself uses.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ingest.access.tokens import ANY
from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS
from ingest.server.route_table import EVERYWHERE, ROUTES, RouteEntry

TEMPLATE = "#/components/schemas/{name}"


def document(version: str) -> dict[str, Any]:
    """The description of a collector; `version` is the program's."""
    messages = [kind for route in ROUTES for kind in (route.body, route.reply) if _is_message(kind)]
    messages = list(dict.fromkeys([*messages, wire.ErrorReply]))
    schemas, components = msgspec.json.schema_components(messages, ref_template=TEMPLATE)
    found = dict(zip(messages, schemas, strict=True))
    components = _with_plain_pairs(components)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, found)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace collector",
            "version": version or "0",
            "description": f"Wire protocol v{wire.PROTOCOL_VERSION}.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _with_plain_pairs(schema: Any) -> Any:
    """Describe tuples of one type as lists of fixed length, which all tools support."""
    if isinstance(schema, list):
        return [_with_plain_pairs(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _with_plain_pairs(value) for key, value in schema.items()}
    first, *others = made.get("prefixItems", [None])
    if first is not None and all(item == first for item in others):
        del made["prefixItems"]
        made["items"] = first
    return made


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _operation(route: RouteEntry, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": _responses(route, schemas),
        "security": [{"token": sorted(route.needed & ANY)}, {}] if route.needed else [{}],
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, schemas)}
    return operation


def _parameters(route: RouteEntry) -> list[dict[str, Any]]:
    text = {"type": "string"}
    named = re.findall(r"{(\w+)}", route.path)
    given = [
        {"name": name, "in": "path", "required": True, "schema": {**text, "minLength": 1}}
        for name in named
    ]
    for place, names in (("query", route.query), ("header", route.headers)):
        for name, says in names.items():
            given.append({"name": name, "in": place, "schema": text, "description": says})
    return given


def _content(kind: Any, schemas: dict[Any, Any]) -> dict[str, Any]:
    """A message in both its encodings, or a media type without a schema."""
    if _is_message(kind):
        return {wire.JSON: {"schema": schemas[kind]}, wire.MSGPACK: {}}
    return {kind: {}}


def _responses(route: RouteEntry, schemas: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(route.status): {"description": "Done.", "content": _content(route.reply, schemas)}
    }
    for status in route.statuses:
        responses[str(status)] = {"description": "See the summary."}
    codes: dict[int, list[str]] = {}
    for code in (*EVERYWHERE, "no_route", "method_not_allowed", *route.refuses):
        known = codes.setdefault(STATUS[code], [])
        if code not in known:
            known.append(code)
    for status, names in sorted(codes.items()):
        if status not in route.statuses:
            responses[str(status)] = {
                "description": "Refused: " + ", ".join(names),
                "content": {wire.JSON: {"schema": schemas[wire.ErrorReply]}},
            }
    return responses
