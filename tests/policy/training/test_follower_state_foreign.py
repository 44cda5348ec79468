"""Checkpoints that another build wrote: set aside or refused by name, and never a bare error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from policy.inference.weight_store import WeightStore
from storage.errors import NewerFormat
from storage.weights.manifest import canonical, open_document, seal_document, sha256
from tests.policy.training.live_log import declare, part, run, write

Body = dict[str, Any]


def position_alone(body: Body) -> None:
    """As before a follower's document had more than the reader's position."""
    body["reader_state"] = body["reader_state"]["position"]


def without_chain(body: Body) -> None:
    del body["reader_state"]["chain"]


def without_lineage(body: Body) -> None:
    del body["lineage"]


def without_schedules(body: Body) -> None:
    body["algorithm_state"] = {}


def with_other_counts(body: Body) -> None:
    body["counts"]["updates"] = "many"


def reader_of_other_keys(body: Body) -> None:
    body["reader_state"]["position"] = {"ordinals": []}


def rewritten(path: Path, change: Callable[[Body], None]) -> None:
    """Change a checkpoint as another build would have written it: with digests that match."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])["__metadata__"]["checkpoint"]
    body = open_document("checkpoint", document.encode(), path)
    change(body)
    metadata = {"checkpoint": seal_document("checkpoint", body).decode()}
    path.write_bytes(safetensors.numpy.save(safetensors.numpy.load(data), metadata=metadata))


def trained(root: Path) -> list[Path]:
    """A root with a follower's version 2, and its checkpoints."""
    declare(root)
    write(root, *(part(ordinal) for ordinal in range(10)))
    run(root, updates=1)
    return sorted((root / "weights/default/checkpoints").glob("follow*"))


@pytest.mark.parametrize(
    "change",
    [
        position_alone,
        without_chain,
        without_lineage,
        without_schedules,
        with_other_counts,
        reader_of_other_keys,
    ],
)
def test_a_foreign_checkpoint_is_set_aside_and_training_goes_on(
    tmp_path: Path, change: Callable[[Body], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The file is named, and the follower continues from the live weights."""
    paths = trained(tmp_path)
    for path in paths:
        rewritten(path, change)
    write(tmp_path, *(part(ordinal) for ordinal in range(10, 20)))
    result, _ = run(tmp_path, updates=1)
    assert (result.updates, result.version) == (2, 3)
    for path in paths:
        assert path.with_name(f"{path.name}.damaged-1").exists()
        assert f"{path.name}.damaged-1" in caplog.text
    lineage = WeightStore(tmp_path, "default").lineage(3)
    assert sum(len(ranges) for ranges in lineage.values()) == 20


def test_a_checkpoint_of_a_later_release_is_refused_by_name(tmp_path: Path) -> None:
    """It stays as it is, and nothing is trained: its rows would be trained on again."""
    *_, path = trained(tmp_path)

    def later(body: Body) -> None:
        body["reader_state"] = {"format": 2, "place": []}

    rewritten(path, later)
    before = path.read_bytes()
    with pytest.raises(NewerFormat, match=f"{path}: follower: format: expected 1, got 2"):
        run(tmp_path, updates=1)
    assert path.read_bytes() == before


def test_a_later_document_of_weights_is_refused_and_damage_of_its_number_is_not(
    tmp_path: Path,
) -> None:
    """From format 2 on the digest covers the number, so that a flipped bit stays damage."""
    trained(tmp_path)
    store, path = WeightStore(tmp_path, "default"), tmp_path / "weights/default/live.json"
    live, data = store.live(), path.read_bytes()
    path.write_bytes(data.replace(b'"format": 1', b'"format": 3'))
    assert store.live() == live  # from its copy
    document = {**json.loads(data), "format": 2}
    del document["digest"]
    path.write_bytes(json.dumps({**document, "digest": sha256(canonical(document))}).encode())
    with pytest.raises(NewerFormat, match=f"{path}: format: expected 1, got 2: a later release"):
        store.live()
