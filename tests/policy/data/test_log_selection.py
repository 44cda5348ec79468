"""The rows that a job reads: of a period, of a manifest, of one schema."""

from dataclasses import replace

from policy.data.log_selection import LogSelection
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Discrete
from tests.policy.conftest import STREAM


def read(selection):
    """(The ordinals that are read, rows left out by reason)."""
    with selection.reader(batch_size=100) as reader:
        ordinals = sorted(int(one) for batch in reader for one in batch["ordinal"])
        selection.count_other_schemas(reader)
        return ordinals, dict(reader.stats.excluded)


def test_a_period_a_manifest_and_a_schema_select_rows(bandit_log, tmp_path):
    """Rows of other schemas than the declared or the given one are counted."""
    bandit_log(20).write(tmp_path)  # row i began at i microseconds
    every = LogSelection(
        root=tmp_path,
        policy_id="default",
        since=None,
        until=None,
        manifest=None,
        schema_id=None,
        retry_for=1.0,
    )
    assert read(every) == ([*range(20)], {})
    assert read(replace(every, since=5, until=8))[0] == [5, 6, 7]
    assert read(replace(every, manifest={STREAM: [(2, 3)]}))[0] == [2, 3]
    save_declaration(tmp_path, PolicyDeclaration(observation=Box((5,)), action=Discrete(2)))
    assert read(every) == ([], {"other_schema": 20})
    assert read(replace(every, schema_id=STREAM.partition("-")[2])) == ([*range(20)], {})
