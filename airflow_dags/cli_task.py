"""One Airflow task that runs one Headrace command.

    train = cli_task("train", "--manifest={manifest}", manifest="{{ ... }}", root=ROOT)

The command is started without a shell, and its exit status decides what becomes of the task
(docs/exit_statuses.md). HEADRACE_PARENT makes it end with the task's process even if that is
killed with SIGKILL. It also locks a frozen data set while it works on it, so that a retry waits for
a command that has survived instead of running at the same time.
"""

from __future__ import annotations

import json
import os
import signal
import string
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from headrace_triggers import AfterSeconds

WRONG_USAGE, TAKEN, CANNOT_TELL, HELD, NOTHING_YET, SKIPPED = 2, 3, 4, 6, 7, 99
"""Exit statuses; SKIPPED is what `publish` is asked to end with for a worse candidate."""
UNDECIDED = ("too young", "cannot tell")


class HeadraceError(AirflowException, ValueError):
    """A command failed, or its last line is not a JSON object; the text has the line."""


class HeadraceOperator(BaseOperator):
    """Runs `headrace WORDS --json`; the XCom is the JSON.

    - `skip_on`: exit statuses that skip the task, with the reason in its note.
    - `answers`: other statuses than 0 whose JSON is the result, as those of `canary`.
    - `only_if`: (task, key, values): skipped unless that task's JSON has one of the values. The
      verdict of `evaluate` is that of its log; a value of None stands for any.
    - `unless`: a parameter that has to be empty, or with `!` before its name has to be given.
    - `options`: option -> the parameter that is its value; left out if that is empty. A list gives
      the option again for each. `more`: further words, which are not rendered.
    - `undecided_for`: seconds to ask again, every `poll` seconds, while the JSON's `state` is
      undecided. The task is deferred meanwhile; so it is while another process has the lease.
    - `keep`: the keys of the JSON that are kept; XComs are small.
    - `event`: the alias of an asset that gets an event with these `keep` keys, if the command
      changed something.
    - `up_to`: pass the ordinals of the asset events that started the run.
    """

    template_fields = ("words", "undecided_for")

    def __init__(
        self,
        *,
        words: Collection[str],
        skip_on: Collection[int] = (CANNOT_TELL, HELD, NOTHING_YET, SKIPPED),
        answers: Collection[int] = (),
        only_if: tuple[str, str, Collection[Any]] | None = None,
        unless: str = "",
        options: Mapping[str, str] | None = None,
        more: Collection[str] = (),
        undecided_for: float | str = 0.0,
        poll: float = 60.0,
        keep: Collection[str] = (),
        event: str | None = None,
        up_to: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(outlets=[] if event is None else [AssetAlias(event)], **kwargs)
        self.words, self.skip_on, self.answers = list(words), skip_on, answers
        self.unless, self.options, self.more = unless, dict(options or {}), list(more)
        self.only_if, self.undecided_for, self.poll = only_if, undecided_for, poll
        self.keep, self.event, self.up_to = keep, event, up_to
        self._child: subprocess.Popen[bytes] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the command, unless an earlier task's answer speaks against it."""
        if self.only_if is not None:
            task, key, values = self.only_if
            document = context["ti"].xcom_pull(task_ids=task) or {}
            found = document.get(key, document.get("logs", [{}])[0].get(key))
            if found not in values if values is not None else found is None:
                self._skip(context, f"{task}: {key} is {found!r}")
        if self.unless:
            name = self.unless.removeprefix("!")
            given = context["params"].get(name)
            if bool(given) != self.unless.startswith("!"):
                self._skip(context, f"the parameter {name} is {given!r}")
        return self._ask(context, time.time())

    def again(self, context: Any, event: Any = None, began: float = 0.0) -> dict[str, Any]:
        """Run the command again after a wait."""
        return self._ask(context, began)

    def _ask(self, context: Any, began: float) -> dict[str, Any]:
        marks = _marks(context) if self.up_to else {}
        words = [*self.words, *self.more, *_options(self.options, context["params"])]
        words += [f"--up-to={name}={last}" for name, last in marks.items()]
        status, last, said = self._run(words)
        if status == TAKEN:
            self._wait(began)
        if status not in (0, *self.answers) or (status and not last):
            self._end(context, status, last, said)
        document = last_line(last)
        waited = time.time() - began
        if document.get("state") in UNDECIDED and waited < float(self.undecided_for):
            self._wait(began)
        return self._told(context, document)

    def _run(self, words: list[str]) -> tuple[int, str, str]:
        """(exit status, last line of stdout, last line of stderr), which goes to the log."""
        line, said = [os.environ.get("HEADRACE_COMMAND", "headrace"), *words, "--json"], ""
        self.log.info("%s", line)
        environment = {**os.environ, "HEADRACE_PARENT": str(os.getpid())}
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as out:
            self._child = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=environment,
            )
            lines = self._child.stderr
            for raw in lines or ():
                text = raw.decode(errors="backslashreplace").rstrip()
                self.log.info("%s", text)
                said = text or said
            if lines is not None:  # after a time-out `on_kill` still needs it
                lines.close()
            status = self._child.wait()
            out.seek(0)
            printed = out.read().splitlines()
        return status, printed[-1] if printed else "", said.removeprefix("headrace: ")

    def on_kill(self) -> None:
        """Pass Airflow's signal on; `_run` waits for the end, so this may not."""
        if self._child is not None and self._child.returncode is None:
            os.kill(self._child.pid, signal.SIGTERM)

    def _wait(self, began: float) -> NoReturn:
        self.log.info("asking again in %g s", self.poll)
        self.defer(trigger=AfterSeconds(self.poll), method_name="again", kwargs={"began": began})

    def _end(self, context: Any, status: int, last: str, said: str) -> NoReturn:
        """Skip or fail a task whose command gave no result."""
        reason = "; ".join(last_line(last).get("reasons", ())) if last[:1] == "{" else ""
        gate = last_line(last).get("gate") if last[:1] == "{" else None
        reason = "; ".join((gate or {}).get("reasons", ())) or reason or said or last
        if status in self.skip_on:
            self._skip(context, reason)
        if status == WRONG_USAGE:
            raise AirflowFailException(reason)
        raise HeadraceError(f"exit status {status}: {reason}")

    def _skip(self, context: Any, reason: str) -> NoReturn:
        context["ti"].xcom_push(key="reason", value=reason)
        note(context, reason)
        raise AirflowSkipException(reason)

    def _told(self, context: Any, document: dict[str, Any]) -> dict[str, Any]:
        kept = {name: document.get(name) for name in self.keep} if self.keep else document
        if self.event is None:
            return kept
        # a retry may find what the killed attempt has published, before its event was stored
        was_there = document.get("unchanged") or document.get("already_live")
        if not was_there or context["ti"].try_number > 1:
            accessor = context["outlet_events"][AssetAlias(self.event)]
            accessor.add(Asset(self.event), extra=kept)
        return kept


def note(context: Any, text: str) -> None:
    """Write a task's note, through Airflow's API: a task has no other way to.

    HEADRACE_AIRFLOW_URL is the API's address, and HEADRACE_AIRFLOW_TOKEN a token for it. Without
    the address the reason is in the log and in the XCom `reason` alone.
    """
    address, token = (os.environ.get(f"HEADRACE_AIRFLOW_{name}") for name in ("URL", "TOKEN"))
    if not address:
        return
    ti = context["ti"]
    run, task = quote(ti.run_id, safe=""), quote(ti.task_id, safe="")
    place = f"/api/v2/dags/{ti.dag_id}/dagRuns/{run}/taskInstances/{task}"
    place += f"/{ti.map_index}" if ti.map_index >= 0 else ""
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    body = json.dumps({"note": text[:1000]}).encode()
    request = urllib.request.Request(
        f"{address}{place}?update_mask=note", body, headers, method="PATCH"
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except OSError as error:
        ti.log.warning("the note cannot be written: %s", error)


def _options(options: Mapping[str, str], params: Mapping[str, Any]) -> list[str]:
    """The options whose parameters are given."""
    words = []
    for option, name in options.items():
        value = params[name]
        values = value if isinstance(value, list) else [] if value in (None, "") else [value]
        words += [f"{option}={one}" for one in values]
    return words


def _marks(context: Any) -> dict[str, int]:
    """Stream -> the highest ordinal of the asset events that started a run."""
    found: dict[str, int] = {}
    for events in (context.get("triggering_asset_events") or {}).values():
        for event in events:
            extra = event.extra.get("payload", event.extra)
            for stream, last in extra.get("streams", {}).items():
                found[stream] = max(int(last), found.get(stream, -1))
    return found


def cli_task(
    command: str,
    *words: str,
    task_id: str | None = None,
    operator: Mapping[str, Any] | None = None,
    timeout: timedelta = timedelta(hours=1),
    **values: str,
) -> HeadraceOperator:
    """The task of `headrace {command} {words} --json`; its XCom is the JSON that it prints.

    A word may contain `{name}`, which stands for `values[name]`: a string that Airflow renders when
    the task runs. `operator`: further arguments of the HeadraceOperator (retries, pools, skip_on).
    Raises ValueError if words and values do not match.
    """
    named = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name}
    if named != values.keys():
        wrong = sorted(named ^ values.keys())
        raise ValueError(f"{wrong}: expected each value in a word, and each name in a word a value")
    filled = [word.format(**values) for word in words]
    settings = {"execution_timeout": timeout, **(operator or {})}
    return HeadraceOperator(task_id=task_id or command, words=[command, *filled], **settings)


def last_line(text: str) -> dict[str, Any]:
    """The JSON object that a command printed last. Raises HeadraceError for anything else."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HeadraceError(f"expected a JSON object as the last line, got {text!r:.200}")
    return document
