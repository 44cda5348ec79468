"""Publishing over HTTP: checks, retries and authorisation.

Also of `ingest.server.weight_routes`.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from ingest.access.key_files import create_token
from ingest.client.policy_client import PolicyClient
from ingest.protocol.messages import Publish
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.weights.decisions import load_decisions
from tests.collector_process import CollectorProcess, declare

PATH = "/v1/policies/default"
SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))


def candidate(seed: int, spec: PolicySpec = SPEC) -> dict[str, Any]:
    """A publisher's request without the number."""
    data = safetensors.numpy.save(dict(Policy(spec, seed=seed).get_weights()))
    return {
        "weights": data,
        "sha256": hashlib.sha256(data).hexdigest(),
        "spec": spec.to_json(),
        "metrics": {"seed": seed},
        "lineage": {"stream": [[0, 7]]},
    }


@dataclass
class House:
    process: CollectorProcess
    store: WeightStore
    token: str

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/msgpack"}
        encoded = msgspec.msgpack.encode(body)
        answer = self.process._pool.request(  # the answer is msgpack, too
            "POST", self.process.address + PATH + path, body=encoded, headers=headers
        )
        decoded = msgspec.msgpack if answer.status < 300 else msgspec.json
        return answer.status, decoded.decode(answer.data)

    def next(self) -> int:
        return max(self.store.versions(), default=0) + 1

    @property
    def generation(self) -> int:
        live = self.store.live()
        return 0 if live is None else live.generation


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    token = create_token(root, "trainer", ["weights:publish", "weights:read"])[1]
    with CollectorProcess(root, log=root / "log") as process:
        yield House(process, WeightStore(root, "default"), token)


def test_what_is_published_is_live_for_clients_at_once(house: House) -> None:
    """The published version's number, content and lineage are in the store, and a client acts with
    it."""
    number = house.next()
    status, now = house.post("/versions", {**candidate(1), "version": number})
    assert (status, now["version"]) == (201, number)
    manifest, weights = house.store.load(number)
    assert manifest.metrics == {"seed": 1}
    assert house.store.lineage(number)["stream"].ranges() == [(0, 7)]
    for name, array in Policy(SPEC, seed=1).get_weights().items():
        np.testing.assert_array_equal(weights[name], array)
    token = create_token(house.process.root, "reader", ["log", "act", "weights:read"])[1]
    header, pause = {"authorization": f"Bearer {token}"}, threading.Event()
    while house.process.request("GET", "/v1/spec", None, header)[0] == 401:
        pause.wait(0.05)  # until the collector has read the new token
    with PolicyClient(house.process.address, token=token) as client:
        client.get_action(client.start_episode(), [0.0] * 4)
        assert client.acting_version() == number
    log = (house.process.root / "log").read_text()
    assert f'"audit":"published","policy":"default","version":{number}' in log


def test_the_same_request_again_publishes_once(house: House) -> None:
    """A retry after a lost answer gets the same answer and changes nothing."""
    body = {**candidate(2), "version": house.next()}
    first = house.post("/versions", body)
    versions, generation = house.store.versions(), house.generation
    assert house.post("/versions", body) == first
    assert (house.store.versions(), house.generation) == (versions, generation)


@pytest.mark.parametrize("offset", [-1, 1, 5])
def test_a_number_that_is_not_next_hears_the_next(house: House, offset: int) -> None:
    """A publication with a wrong number gets 409, which names the next one; the live version is
    unchanged, and the refused one is not kept.
    """
    house.post("/versions", {**candidate(3), "version": house.next()})
    generation, number = house.generation, house.next()
    kept = house.store.candidates()
    status, answer = house.post("/versions", {**candidate(40 + offset), "version": number + offset})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert f"expected the next version, {number}" in answer["error"]["message"]
    assert house.generation == generation
    assert house.next() == number
    assert house.store.candidates() == kept


def test_a_version_that_was_numbered_and_not_live_yet_is_finished(house: House) -> None:
    """The collector was killed in between: the same request completes it."""
    body = {**candidate(6), "version": house.next()}
    weights = Policy(SPEC, seed=6).get_weights()
    digest = house.store.add_candidate(
        weights, spec=body["spec"], metrics=body["metrics"], lineage=body["lineage"]
    )
    assert house.store.promote(digest) == body["version"]
    status, now = house.post("/versions", body)
    assert (status, now["version"]) == (201, body["version"])


def broken(**changes: Any) -> dict[str, Any]:
    return {**candidate(9), **changes}


def packed(arrays: dict[str, Any]) -> dict[str, Any]:
    data = safetensors.numpy.save(arrays)
    return {"weights": data, "sha256": hashlib.sha256(data).hexdigest()}


def nested(depth: int) -> Any:
    """This many lists, each within the next."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HUGE = {
    name: np.full_like(array, 3e38) for name, array in Policy(SPEC, seed=1).get_weights().items()
}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (broken(metrics={"x": nested(32)}), "metrics.x[0]"),
        (broken(metrics={"x": nested(900)}), "metrics"),
        (broken(spec={**SPEC.to_json(), "module": nested(900)}), "spec"),
        (broken(filter_state={"x": nested(900)}), "filter_state"),
        (broken(**packed(HUGE)), "weights"),  # finite, and no action comes of them
        (broken(sha256="0" * 64), "SHA-256"),
        (broken(weights=b"\x80\x04cpickle"), "SHA-256"),
        (broken(weights=b"x", sha256=hashlib.sha256(b"x").hexdigest()), "weights"),
        (broken(**packed({"pi.0.weight": np.full((2, 2), np.nan, np.float32)})), ""),
        (broken(**packed({"other": np.zeros(3, np.float32)})), ""),
        (broken(spec={}), "spec"),
        (candidate(9, PolicySpec(parse_space("box:3"), parse_space("discrete:2"))), "declared"),
        (broken(filter_state={"x": 1}), ""),
        (broken(metrics={"x": float("nan")}), "metrics"),
        (broken(lineage={"stream": [[7, 0]]}), ""),
        (broken(surprise=1), "surprise"),
    ],
)
def test_what_nobody_could_act_with_is_refused(
    house: House, body: dict[str, Any], text: str
) -> None:
    """422 before anything is stored: no version, no candidate, the live version is unchanged."""
    before = house.generation, house.store.versions(), house.store.candidates()
    status, answer = house.post("/versions", {**body, "version": house.next()})
    assert (status, answer["error"]["code"]) == (422, "invalid"), answer
    assert text in answer["error"]["message"]
    if text in Publish.__struct_fields__:
        assert answer["error"]["path"].startswith(f"$.{text}")
    assert (house.generation, house.store.versions(), house.store.candidates()) == before


@pytest.mark.parametrize("number", [2**64, 2**70, -(2**63) - 1])
@pytest.mark.parametrize("field", ["metrics", "spec", "filter_state"])
def test_a_number_that_msgpack_cannot_carry_is_refused(
    house: House, number: int, field: str
) -> None:
    """JSON can express a larger number, but clients fetch weights in msgpack, and publishers the
    list of versions.
    """
    body = {**candidate(9), "version": house.next()}
    body |= {field: {"x": [1, number]}, "weights": base64.b64encode(body["weights"]).decode()}
    if field == "spec":
        body["spec"] = {**SPEC.to_json(), "version": number}
    headers = {"authorization": f"Bearer {house.token}"}
    before = house.generation, house.store.candidates()
    status, answer = house.process.request("POST", PATH + "/versions", body, headers)
    assert (status, answer["error"]["code"]) == (422, "invalid")
    assert answer["error"]["path"].startswith(f"$.{field}")
    assert (house.generation, house.store.candidates()) == before


def test_a_rollback_happens_once(house: House) -> None:
    """A rollback names the generation that it applies to: repeated, it is a conflict."""
    for seed in (20, 21):
        assert house.post("/versions", {**candidate(seed), "version": house.next()})[0] == 201
    body = {"generation": house.generation, "why": "it was worse"}
    status, now = house.post("/rollback", body)
    assert status == 201
    kept = load_decisions(house.process.root, "default").known[-1]
    assert (kept["version"], kept["reasons"][1]) == (now["version"], "it was worse")
    assert house.store.manifest(now["version"]).metrics == {"seed": 20}
    assert house.post("/rollback", body)[0] == 409
    status, answer = house.post("/rollback", {"generation": house.generation, "to": 10_000})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert str(house.process.root) not in answer["error"]["message"]
    status, answer = house.post("/rollback", {"generation": house.generation, "to": now["version"]})
    assert (status, answer["error"]["code"]) == (422, "invalid")
    assert "`headrace pause`" in answer["error"]["message"]


@pytest.mark.parametrize("version", ["9" * 300, "-1", "0", "1/../2", "%00", "10000"])
def test_a_version_that_is_not_there_tells_nothing_of_the_disk(house: House, version: str) -> None:
    """404, and the answer names no folder of the server."""
    path = f"{PATH}/weights?version={version}"
    header = {"authorization": f"Bearer {house.token}"}
    status, answer = house.process.request("GET", path, None, header)
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert str(house.process.root) not in answer["error"]["message"]


def test_nobody_publishes_without_a_token_of_its_own(tmp_path: Path) -> None:
    """A loopback collector without tokens lets everybody log, and nobody publish."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as process:
        for path in ("/versions", "/rollback"):
            assert process.post(PATH + path, {})[0] == 403
