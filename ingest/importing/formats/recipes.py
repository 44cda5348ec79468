"""What a format finds in files, and the tables of those that it reads itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.importing.grouping import joined
from ingest.importing.readers import (
    BLOCK_ROWS,
    Blocks,
    OpenedFile,
    Problem,
    SourceBlock,
    numbered,
    readable,
)
from ingest.importing.sources import FileUnit, Unit, files_of, require_whole
from ingest.protocol.errors import ImportFailed

Array: TypeAlias = NDArray[Any]
StepArrays: TypeAlias = dict[str, Array]
"""Column -> the values of consecutive rows, (N, ...); masked where there are none."""

EPISODE = "episode"
REWARDS, ENDED = "rewards", "terminated"


@dataclass(frozen=True)
class Recipe:
    """The units of a source, the options that give their columns a meaning, notes for the user."""

    units: list[Unit]
    options: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=list)


def whole_files(path: Path) -> list[Unit]:
    """A file, or the files of a folder, that are all whole. Raises ImportFailed."""
    units = files_of(path)
    require_whole(units)
    return units


def json_files(path: Path) -> list[FileUnit]:
    """The same, of files with lines of JSON. Raises ImportFailed for others."""
    units = [unit for unit in whole_files(path) if isinstance(unit, FileUnit)]
    for unit in units:
        if not unit.has_json:
            raise ImportFailed(f"{unit.label}: expected lines of JSON, got another file")
    return units


def file_of(path: Path, pattern: str, what: str) -> Path:
    """The file itself, or the only one in a folder whose name matches. Raises ImportFailed."""
    if not path.is_dir():
        return path
    found = sorted(path.rglob(pattern))
    if len(found) != 1:
        raise ImportFailed(f"{path}: expected one file {pattern} of {what} in it, got {len(found)}")
    return found[0]


Pieces: TypeAlias = Callable[[Path], Iterator[StepArrays | Problem]]
"""Reads a file: rows, which all have the columns of the first, and what could not be read."""


def table_unit(path: Path, kind: str, pieces: Pieces, like: FileUnit | None = None) -> FileUnit:
    """A unit of a file that `pieces` reads, with the label and place of another one of it."""

    def opened(file: Path) -> OpenedFile:
        with readable(file, kind):
            names = list(first_rows(file, pieces))

        def blocks(columns: Sequence[str]) -> Blocks:
            problems: list[Problem] = []
            with readable(file, kind):
                rows = batches_of_rows(_without_problems(pieces(file), problems), columns, file)
                for block in numbered(rows, columns):
                    block.problems, problems[:] = [*problems], []
                    yield block
            if problems:
                nothing = pa.table({name: pa.nulls(0) for name in columns})
                yield SourceBlock(nothing, np.zeros(0, np.int64), problems)

        return names, blocks

    if like is None:
        return FileUnit(path, path.name, opened=opened)
    return FileUnit(path, like.label, place=like.place, opened=opened)


def first_rows(path: Path, pieces: Pieces) -> StepArrays:
    """The first rows of a file. Raises ImportFailed if it has none."""
    problem: Problem | None = None
    with readable(path, "a file of this format"):
        for piece in pieces(path):
            if not isinstance(piece, Problem):
                return piece
            problem = problem or piece
    why = "" if problem is None else f"; number {problem.number}, {problem.reason}"
    raise ImportFailed(f"{path}: expected episodes, got none{why}")


def _without_problems(
    pieces: Iterator[StepArrays | Problem], problems: list[Problem]
) -> Iterator[StepArrays]:
    for piece in pieces:
        if isinstance(piece, Problem):
            problems.append(piece)
        else:
            yield piece


def batches_of_rows(
    pieces: Iterator[StepArrays], columns: Sequence[str], path: Path
) -> Iterator[Any]:
    """Record batches of about BLOCK_ROWS rows. Raises ImportFailed if one lacks a column."""
    held, rows = list[Any](), 0
    for piece in pieces:
        if lacking := [name for name in columns if name not in piece]:
            text = f"expected {', '.join(lacking)} in all episodes, got one without"
            raise ImportFailed(f"{path}: {text}")
        held.append(pa.table({name: arrow_column(piece[name]) for name in columns}))
        rows += len(held[-1])
        if rows >= BLOCK_ROWS:
            yield from joined(held).combine_chunks().to_batches()
            held, rows = [], 0
    if held:
        yield from joined(held).combine_chunks().to_batches()


def arrow_column(values: Array) -> Any:
    """An array (N, ...) as N numbers, texts, or lists of numbers; masked rows are null.

    A row of one number is that number.
    """
    missing = np.ma.getmaskarray(values) if np.ma.isMaskedArray(values) else None
    shape = len(values), math.prod(values.shape[1:])
    flat = np.asarray(values).reshape(shape)
    mask = None if missing is None else missing.reshape(shape).all(axis=1)
    if flat.shape[1] == 1:
        kind = pa.string() if flat.dtype.kind == "O" else None
        return pa.array(flat[:, 0], kind, mask=mask)
    inner = pa.array(np.ascontiguousarray(flat).reshape(-1))
    nulls = None if mask is None else pa.array(mask)
    return pa.FixedSizeListArray.from_arrays(inner, flat.shape[1], mask=nulls)


def flat_values(values: Any, name: str) -> StepArrays:
    """Column -> array, of the nested dicts and tuples of arrays that a space's values are."""
    if isinstance(values, Mapping):
        pairs = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, (tuple, list)):
        pairs = [(str(at), value) for at, value in enumerate(values)]
    else:
        return {name: values}
    return {
        inner: array
        for key, value in pairs
        for inner, array in flat_values(value, f"{name}.{key}").items()
    }


def with_next(observations: StepArrays, steps: int) -> StepArrays:
    """Observations of an episode, and the next ones as `next.NAME`, masked where unknown.

    They have a row for each step, and one more if the final observation is known. Raises ValueError
    for other lengths.
    """
    rows: StepArrays = {}
    for name, values in observations.items():
        if len(values) not in (steps, steps + 1):
            raise ValueError(f"{name} has {len(values)} rows for {steps} steps")
        rows[name] = values[:steps]
        following = values[1 : steps + 1]
        known = np.arange(steps) < len(following)
        padded = np.concatenate([following, values[: steps - len(following)]])
        mask = np.broadcast_to(~known.reshape(-1, *([1] * (values.ndim - 1))), padded.shape)
        rows[f"next.{name}"] = np.ma.MaskedArray(padded, mask)
    return rows


def ended(steps: int, at_end: bool) -> Array:
    """A flag of each step of an episode, which only the last one may have."""
    flags = np.zeros(steps, bool)
    flags[-1:] = at_end
    return flags


def actions_option(names: Sequence[str], floats: bool) -> list[str]:
    """The columns of an action, as numbers if they are floats, also if all are whole."""
    return [f"{name}:box" if floats else name for name in names]


def episode_options(rows: Mapping[str, Array]) -> dict[str, Any]:
    """The options for rows whose columns are named as here."""
    observations = [name for name in rows if name.partition(".")[0] == "observations"]
    actions = [name for name in rows if name.partition(".")[0] == "actions"]
    floats = any(np.asarray(rows[name]).dtype.kind == "f" for name in actions)
    return {
        "observation": observations,
        "final_observation": [f"next.{name}" for name in observations],
        "action": actions_option(actions, floats),
        "reward": REWARDS,
        "episode": EPISODE,
        "terminated": ENDED,
    }
