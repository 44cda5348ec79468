"""The counts of dropped steps: by collector, replaced as a whole, never fatal."""

from __future__ import annotations

import os
from pathlib import Path

from storage.declarations.dropped_steps import Lost, dropped_steps, read_dropped, say_dropped


def test_the_counts_of_all_collectors_add_up(tmp_path: Path) -> None:
    """Each collector has its own file; a repeated report adds nothing."""
    assert dropped_steps(tmp_path) == Lost(0, 0)
    for _ in range(2):
        say_dropped(tmp_path, "a", {"one": Lost(1, 10), "two": Lost(2, 20)})
    say_dropped(tmp_path, "b", {"three": Lost(3, 30)})
    assert dropped_steps(tmp_path) == Lost(6, 60)
    assert read_dropped(tmp_path, "a") == {"one": Lost(1, 10), "two": Lost(2, 20)}


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    """A damaged count does not stop a judgement."""
    say_dropped(tmp_path, "a", {"one": Lost(1, 10)})
    for text in ("", "[1]", '{"one": 3}', '{"one": [1]}'):
        (tmp_path / "dropped" / "b.json").write_text(text)
        assert dropped_steps(tmp_path) == Lost(1, 10)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    say_dropped(tmp_path, "a", {"one": Lost(1, 10)})
    os.mkfifo(tmp_path / "dropped" / "b.json")
    assert dropped_steps(tmp_path) == Lost(1, 10)
