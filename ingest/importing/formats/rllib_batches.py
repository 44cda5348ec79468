"""RLlib's JsonWriter files: a batch of steps per line, each of its columns a list."""

from __future__ import annotations

from pathlib import Path

from ingest.importing.engine import FILE, ROW, Workspace, name_sql
from ingest.importing.formats.recipes import Recipe, actions_option, json_files
from ingest.importing.options import ImportOptions
from ingest.importing.sources import KeptUnit
from ingest.protocol.errors import ImportFailed

_COLUMNS = (
    *("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "dones", "eps_id", "t"),
    *("agent_index", "action_logp", "action_prob"),
)

_NO_LIST = f"""
SELECT "{FILE}", "{ROW}", left({{name}}, 30) FROM source WHERE left({{name}}, 1) <> '[' LIMIT 1
"""
_NO_BATCH = f"""
SELECT "{FILE}", "{ROW}", type FROM source WHERE type <> '"SampleBatch"' OR rewards IS NULL LIMIT 1
"""
_BATCHES = """
SELECT "{file}", "{row}", {lists}, unnest(range(json_array_length(rewards)::BIGINT)) AS place
FROM source
"""
_STEPS = """
SELECT "{file}", "{row}", place, {columns}, {step} AS step FROM ({batches})
"""
_STEP = "CAST(t AS BIGINT) - min(CAST(t AS BIGINT)) OVER (PARTITION BY eps_id)"
"""A file may begin in the middle of an episode; a gap is still an error."""


def rllib(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A file, or the files of a folder. Raises ImportFailed for compressed columns."""
    units = json_files(path)
    kept = KeptUnit.every(units, space.connection(), ("type", "rewards"), raw=True)
    kept.rows.show({})
    there = [name for name in _COLUMNS if name in kept.names()]
    query = kept.rows.connection.execute
    for name in there:
        for file, row, begin in query(_NO_LIST.format(name=name)).fetchall():
            got = begin
            if begin.startswith('"'):
                got = (
                    "a compressed column, which only RLlib can read: write with "
                    "output_compress_columns=[]"
                )
            raise ImportFailed(f"{file} row {row}: {name}: expected a list of steps, got {got}")
    for file, row, kind in query(_NO_BATCH).fetchall():
        text = f"expected a SampleBatch with rewards, got {kind}: batches of several agents are not"
        raise ImportFailed(f"{file} row {row}: type: {text} read")
    missing = [name for name in ("obs", "actions", "rewards") if name not in there]
    if missing:
        raise ImportFailed(f"{path}: expected batches of RLlib, got none with {missing}")
    lists = ", ".join(
        f"""unnest(from_json({name}, '["VARCHAR"]')) AS {name}"""
        if name not in ("obs", "new_obs", "actions")
        else f"""unnest(from_json({name}, '["JSON"]'))::VARCHAR AS {name}"""
        for name in there
    )
    batches = _BATCHES.format(file=FILE, row=ROW, lists=lists)
    if "agent_index" in there:
        ((agents,),) = query(f"SELECT count(DISTINCT agent_index) FROM ({batches})").fetchall()
        if agents > 1:
            raise ImportFailed(f"{path}: agent_index: expected one agent, got {agents}")
    ((floats,),) = query(f"SELECT bool_or(actions LIKE '%.%') FROM ({batches})").fetchall()
    whole = {"eps_id", "t"} <= {*there}
    columns = ", ".join(map(name_sql, there))
    sql = _STEPS.format(
        file=FILE, row=ROW, columns=columns, batches=batches, step=_STEP if whole else "NULL"
    )
    episode = "eps_id" if "eps_id" in there else None
    kept.select(sql, (episode, "step" if whole else None, FILE, ROW, "place"))
    flag = "terminateds" if "terminateds" in there else "dones"
    named = {
        "final_observation": ["new_obs"] if "new_obs" in there else (),
        "terminated": flag if flag in there else None,
        "truncated": "truncateds" if "truncateds" in there else None,
        "episode": episode,
        "step": "step" if whole else None,
        "action_logp": "action_logp" if "action_logp" in there else None,
    }
    if "action_logp" not in there and "action_prob" in there:
        named["action_prob"] = "action_prob"
    action = actions_option(["actions"], bool(floats))
    found = {"observation": ["obs"], "action": action, "reward": "rewards", **named}
    return Recipe([kept], {name: value for name, value in found.items() if value})
