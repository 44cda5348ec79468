"""One Airflow task that runs one Headrace command.

    train = cli_task("train", "--manifest={manifest}", manifest="{{ ... }}", root=ROOT)

The bash of the task `exec`s the command, so that Airflow's signals reach Headrace itself.
HEADRACE_PARENT asks it to die with the task's process even when that is killed with SIGKILL, which
no handler survives to pass on; and the command holds a lock while it works on a frozen data set, so
that a retry waits for a survivor, should there be one, instead of running beside it.

Values travel as environment variables, never inside the shell's text: whoever may trigger a run can
set parameters, and a parameter must not become a command.
"""

from __future__ import annotations

import json
import string
from collections.abc import Container
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator

SKIPPED = 99
"""The exit code that means: nothing was wrong, and nothing further is to be done."""

CANNOT_TELL = 4
"""The exit code of a judgement that the episodes do not allow: an answer too, and recorded."""

EXECUTABLE = '"${HEADRACE_COMMAND:-headrace}"'
"""Looked up on the worker: Headrace lives in an environment of its own."""


class HeadraceError(ValueError):
    """A command ended well, but its last line is no JSON object; the text shows the line."""


def cli_task(
    command: str,
    *words: str,
    task_id: str | None = None,
    skip_on: Container[int] = (SKIPPED,),
    operator: dict[str, Any] | None = None,
    **values: str,
) -> BashOperator:
    """The task of `headrace {command} {words} --json`; its XCom is the JSON that it prints.

    A word may hold `{name}`, which stands for `values[name]`: a string that Airflow renders when
    the task runs. `skip_on`: exit codes that leave the task skipped instead of failed. `operator`:
    further arguments of the BashOperator (retries, pools, time-outs). Raises ValueError when words
    and values do not fit each other.
    """
    line = " ".join(_quoted(word, values) for word in words)
    return BashOperator(
        task_id=task_id or command,
        bash_command=f"HEADRACE_PARENT=$PPID exec {EXECUTABLE} {command} {line} --json",
        env={_variable(name): value for name, value in _used(words, values).items()},
        append_env=True,
        skip_on_exit_code=skip_on,
        output_processor=last_line,
        **(operator or {}),
    )


def last_line(text: str) -> dict[str, Any]:
    """The JSON object that a command printed last. Raises HeadraceError for anything else."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HeadraceError(f"expected a JSON object as the last line, got {text!r:.200}")
    return document


def _variable(name: str) -> str:
    return f"arg_{name}"


def _quoted(word: str, values: dict[str, str]) -> str:
    """A word in double quotes, `{name}` as the variable that holds its value."""
    text = ""
    for literal, name, _, _ in string.Formatter().parse(word):
        if set(literal) & set('$`"\\!{}'):
            raise ValueError(f"word {word!r}: expected plain text and {{name}}; pass it as a value")
        text += literal
        if name is not None:
            if name not in values:
                raise ValueError(f"word {word!r}: expected one of {sorted(values)}, got {name!r}")
            text += f"${{{_variable(name)}}}"
    return f'"{text}"'


def _used(words: tuple[str, ...], values: dict[str, str]) -> dict[str, str]:
    """The values, none of which may be forgotten by the words."""
    named = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name}
    if unused := sorted(values.keys() - named):
        raise ValueError(f"values {unused}: expected a word that names each, got {words}")
    return values
