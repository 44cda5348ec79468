"""One Airflow task that runs one Headrace command.

    train = cli_task("train", "--manifest={manifest}", manifest="{{ ... }}", root=ROOT)

The task's bash `exec`s the command, so that Airflow's signals reach Headrace itself.
HEADRACE_PARENT makes the command end with the task's process even if that is killed with SIGKILL.
The command also locks a frozen data set while it works on it, so that a retry waits for a command
that has survived instead of running at the same time.

Values are passed as environment variables, never as shell text: users who can trigger a run can set
its parameters, and a parameter must not become a command.
"""

from __future__ import annotations

import json
import string
from collections.abc import Container
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator

SKIPPED = 99
"""The exit code that means: no error, and nothing more to do."""

CANNOT_TELL = 4
"""The exit code of an undecided judgement, which is recorded like any other."""

EXECUTABLE = '"${HEADRACE_COMMAND:-headrace}"'
"""Found on the worker: Headrace has an environment of its own."""


class HeadraceError(ValueError):
    """A command succeeded, but its last line is not a JSON object; the text has the line."""


def cli_task(
    command: str,
    *words: str,
    task_id: str | None = None,
    skip_on: Container[int] = (SKIPPED,),
    operator: dict[str, Any] | None = None,
    **values: str,
) -> BashOperator:
    """The task of `headrace {command} {words} --json`; its XCom is the JSON that it prints.

    A word may contain `{name}`, which stands for `values[name]`: a string that Airflow renders when
    the task runs. `skip_on`: exit codes that make the task skipped instead of failed. `operator`:
    further arguments of the BashOperator (retries, pools, time-outs). Raises ValueError if words
    and values do not match.
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
    """A word in double quotes, with `{name}` as the variable that holds its value."""
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
    """The values, all of which the words must use."""
    named = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name}
    if unused := sorted(values.keys() - named):
        raise ValueError(f"values {unused}: expected a word that names each, got {words}")
    return values
