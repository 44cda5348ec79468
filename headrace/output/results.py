"""Print results for people, from the same documents that --json prints.

Each function takes one command's document and prints it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headrace.output.console import moment, printable, table
from ingest.status.answers import QUESTIONS
from ingest.status.answers import named as version_name
from ingest.status.decision_words import AT_LEAST, LABELS, decided, in_words
from storage.wording import counted, duration

Document = Mapping[str, Any]
Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""(title, column names, rows)."""


def imported(document: Document, given: str | None = None) -> None:
    """Print `import`: the result for each row, the faulty rows, how columns were understood.

    `given` is the name that the user gave it.
    """
    counts = {
        "in the source": document["rows"],
        "would be sent" if document["checked"] else "acknowledged": document["steps"],
        "known already": "not asked" if document["checked"] else document["rows_known"],
        "left out": document["rows_left_out"],
        "dropped for a missing cell": document["rows_dropped"],
    }
    if document["rows_repeated"]:
        counts["with the key of an earlier row"] = document["rows_repeated"]
    where = f"for policy {', '.join(document['policies'])} of {document['address']}"
    title = f"Imported {'' if given is None else f'{given!r} '}as {document['name']} {where}"
    if document["checked"]:
        title = f"Checked {where}" if document["address"] else "Checked; no collector answered"
    table(title, ("rows", "count"), counts.items())
    if "codes" in document["understood"]:
        codes = document["understood"]["codes"]
        columns = [f"{column} {counted(names, 'name')}" for column, names in codes["names"].items()]
        none = "not used, because the policy declares the names"
        print(f"File of codes {codes['file']}: {', '.join(columns) or none}")
    if document["checked"]:
        _understood(document["understood"])
    for bad in document["bad"]:
        print(f"{bad['source']} row {bad['row']}: {bad['reason']}")
    faulty = sum(document["bad_counts"].values())
    if faulty > len(document["bad"]):
        print(f"... and {counted(faulty - len(document['bad']), 'more row')} with errors; in all:")
        for reason, rows in document["bad_counts"].items():
            print(f"{counted(rows, 'time')}: {reason}")
    for note in document["notes"]:
        print(f"Note: {note}.")
    for column, rows in document["read_as_other"].items():
        print(
            f"Column {column}: {rows:,} of {counted(document['rows'], 'row')} have none of the "
            "policy's names there, and are read as its name for all others."
        )
    for policy_id, checks in document["logs"].items():
        _reviewed(policy_id, checks)
    episodes, seconds = counted(document["episodes"], "episode"), f"{document['seconds']:.1f} s"
    is_check = document["checked"]
    print(f"{episodes} would be sent ({seconds})" if is_check else f"{episodes} in {seconds}")
    used = document["episodes"] or document["skipped_known"]
    for policy, window in document["reward_windows"].items() if used else ():
        whose = f" of {policy}" if len(document["policies"]) > 1 else ""
        print(
            f"Imported episodes{whose} {'would ' if is_check else ''}accept late rewards for "
            f"{duration(window)} of the collector's running time. They can be trained on after "
            "that."
        )
    if used and not is_check:
        _listed(document)


def _listed(document: Document) -> None:
    """Say what `ls` will show of an import: its rows, in the streams of its policies."""
    rows = document["steps"] + document["rows_known"]
    streams = [*dict.fromkeys(document["streams"].values())]
    where = f"{'stream' if len(streams) == 1 else 'streams'} {', '.join(streams)}"
    print(f"`headrace ls` counts {counted(rows, 'row')} of this in the {where}, once in shards.")


def _understood(found: Document) -> None:
    """Print the spaces, and the count and range of each number in the episodes."""
    if "format" in found:
        named = {**found["format"]}
        print(f"Format {named.pop('name')}: {json.dumps(named)}")
    for policy, spaces in found["spaces"].get("policies", {"": found["spaces"]}).items():
        for name in ("observation", "action"):
            of = f" of {policy}" if policy else ""
            print(f"{name}{of}, by {spaces['by']}: {json.dumps(spaces[name])}")
    names = {"steps": "steps of an episode", "rewards": "rewards", "returns": "returns"}
    names |= {"propensities": "propensities", "times": "times (UTC)"}
    shown = {"times": lambda micros: moment(round(micros))}
    rows = [
        (label, *_range(found[name], shown.get(name, "{:.6g}".format)))
        for name, label in names.items()
    ]
    table("Understood", ("", "count", "lowest", "mean", "highest"), rows)


def _range(seen: Document, shown: Callable[[float], str]) -> tuple[object, ...]:
    known = seen["count"] > 0
    values = (seen[name] if known else None for name in ("low", "mean", "high"))
    return seen["count"], *("-" if value is None else shown(value) for value in values)


def trained(document: Document, latest: str | None = None) -> None:
    """Print `train`: how every row of the log was used, and the candidate.

    `latest` is the candidate that commands use by default.
    """
    counts = {"read for training": document["rows_read"], "trained on": document["rows_trained"]}
    counts |= {f"left out: {_label(why)}": rows for why, rows in document["excluded"].items()}
    counts |= {"held out": document["rows_held_out"]}
    counts |= {f"not read: {_label(why)}": rows for why, rows in document["not_read"].items()}
    table(f"Trained {document['policy_id']}", ("rows", "count"), counts.items())
    for path, why in document["skipped"].items():
        print(f"left out, damaged: {path}: {why}")
    kind, *setting = document["action_rule"].items()
    print(f"Action rule: {', '.join([str(kind[1]), *(f'{k} {v:g}' for k, v in setting)])}")
    if (blocks := document.get("cross_fit")) is not None:
        print(f"Cross-fitted: all but the first of {blocks} blocks judge it.")
    print(f"Candidate {document['candidate']}")
    if document["unchanged"]:
        print(
            "It was there already: trained on the same rows, with the same settings. `headrace ls` "
            "counts the steps that are not in shards yet."
        )
    if latest not in (None, document["candidate"]):
        print(
            f"`latest` is {latest}, which was added after it: give the first 6 characters of this "
            "one, or more, to judge or publish it."
        )


def evaluated(logs: Sequence[Document]) -> None:
    """Print `evaluate`: the estimates, the deciding differences, the checks, the verdict."""
    estimates(logs)
    for title, columns, rows in judgements(logs):
        table(title, columns, rows)
    for line in verdicts(logs):
        print(line)


def judgements(logs: Sequence[Document]) -> list[Table]:
    """The differences that decide, and the checks of each log."""
    rows = []
    for log in logs:
        for one in log["comparisons"]:
            low, high = map(_number, one["interval"])
            bound = f"{one['method']}, {one['bound']}"
            interval = f"{low} .. {high}"
            value = (_number(one["difference"]), interval, bound, one["n"], one["verdict"])
            margin = one.get("margin", 0.0)
            bar = f"{one['bar']}, margin {_number(margin)}" if margin else one["bar"]
            rows.append((log["label"], bar, *value))
    unit = "units" if any(log.get("cluster") for log in logs) else "episodes"
    columns = ("log", "against", "difference", "interval", "bound", unit, "verdict")
    decisive = ("Decisive differences: value per episode, weights minus bar", columns, rows)
    checks = [
        (
            log["label"],
            _label(one["name"]),
            _number(one["value"]),
            _limit(one),
            "ok" if one["passed"] else "FAILED",
            one["sentence"],
        )
        for log in logs
        for one in log["diagnostics"]
    ]
    return [decisive, ("Checks", ("log", "check", "value", "has to be", "", "in words"), checks)]


def verdicts(logs: Sequence[Document]) -> list[str]:
    """The verdict on each log, and the reasons."""
    lines = []
    for log in logs:
        approximate = " (approximate: no reward_range)" if log["approximate"] else ""
        lines.append(f"{log['label']}: {log['verdict']}{approximate}")
        lines += [f"  {in_words(reason)}" for reason in log["reasons"]]
    return lines


def refused(gate: Document) -> None:
    """Print to stderr why the gate refused, and whether this was a look (it had an interval)."""
    for reason in gate["reasons"]:
        print(f"{gate['verdict']}: {in_words(reason)}", file=sys.stderr)
    if gate["comparisons"]:
        look, less = (
            gate["looks"] + 1,
            "a further look has a wider interval, so it needs more evidence",
        )
        print(f"note: this was look {look} at the candidate; {less}", file=sys.stderr)


def _label(name: str) -> str:
    words = name.removeprefix("live_")
    words = LABELS.get(words, words.replace("_", " "))
    return f"live version: {words}" if name.startswith("live_") else words


def _limit(check: Document) -> str:
    """The required value of a check; "" if it only informs."""
    if check["threshold"] is None:
        return ""
    name, limit = check["name"].removeprefix("live_"), _number(check["threshold"])
    if name == "mean_weight":
        return f"about {limit}"
    return f"at least {limit}" if name in AT_LEAST else f"at most {limit}"


def why_published(document: Document) -> str:
    """For `publish`: why a version may be live, and the verdict if it was judged."""
    judgement = document["gate"]
    if judgement is not None:
        than = [_better_than(one) for one in judgement["comparisons"]]
        approximate = ", approximately" if judgement["approximate"] else ""
        return f"{' and '.join(than)}{approximate}"
    if document.get("already_live"):  # not in a frozen data set's older records
        return "it was live already"
    return "without a gate: not judged"


def _better_than(one: Document) -> str:
    """What "better" means for a comparison; decisions of release 0.1.0 have no margin."""
    bar, margin = one["bar"], one.get("margin", 0.0)
    if margin < 0:
        return f"not worse than {bar} by more than {_number(-margin)}"
    return f"better than {bar}" + (f" by at least {_number(margin)}" if margin else "")


def arms(document: Document) -> None:
    """Print `canary`: the returns of each arm, and its failures."""
    title, columns, rows = armed(document)
    table(title, columns, rows) if rows else print(title)
    count = document["n"]
    episodes = counted(count["canary"], "episode")
    compared = f"{episodes} of the canary and {count['live']:,} of the live version"
    if count["canary"] or count["live"]:
        compared += (
            f". Of these, {document['open']:,} had not ended when they were counted, and in "
            f"{document['crossed']:,} the other version acted first; in {document['unacted']:,} "
            "the program chose the first action itself"
        )
    print(f"Compared: {compared}.")
    print(
        f"In shards, not compared yet: {document['young'] - document['waiting']:,} too recent, "
        f"{document['waiting']:,} waiting for later ones."
    )
    if "journal" in document:
        held = _in_journal(document["journal"])
        print(f"Open episodes of the policy, and those that await late rewards: {held}.")
    approximate = " (approximate: no reward_range)" if document["approximate"] else ""
    if (cap := document.get("reward_cap")) is not None:
        print(f"Rewards count up to {_number(cap)} per step.")
    margin = (document["returns"] or {}).get("margin", 0.0)
    asked = f", with a margin of {_number(margin)}" if margin else ""
    print(f"{document['verdict']}{asked}{approximate}")
    for reason in document["reasons"]:
        print(f"  {reason}")
    if document.get("note"):
        print(f"note: {document['note']}")


def _in_journal(found: Document) -> str:
    if found["why"]:
        return f"an unknown number ({printable(found['why'])})"
    return f"{found['open_episodes']:,}"


def armed(document: Document) -> Table:
    """The returns of each arm, and its failures."""
    rows = []
    for name in ("returns", "failures"):
        one = document[name]
        if one is not None:
            low, high = map(_number, one["interval"])
            values = (_number(one["canary"]), _number(one["live"]), _number(one["difference"]))
            rows.append((name, *values, f"{low} .. {high}", one["bound"]))
    columns = ("mean of", "canary", "live", "difference", "interval", "bound")
    title = f"Version {document['canary']} in {document['share']:.3g} of the episodes"
    return (f"{title}, compared with version {document['live']}", columns, rows)


def decisions(document: Document) -> None:
    """Print `decisions`: each with its reasons on lines of their own, the newest last."""
    print(f"Decisions about {document['policy_id']}")
    for one in document["decisions"]:
        command, outcome, reasons = decided(one)
        print(f"{moment(one['decided'])}  {one['candidate'][:12]}  {command}: {outcome}")
        for reason in reasons:
            print(f"  {printable(reason)}")
    if not document["decisions"]:
        print("  none yet")
    for path, why in document["damaged"].items():
        print(f"cannot be read: {path}: {why}")


def estimates(logs: Sequence[Document]) -> None:
    """Print every estimate of every log, and what was not used for it."""
    table(*estimated(logs))
    for line in not_used(logs):
        print(line)


def estimated(logs: Sequence[Document]) -> Table:
    """The logging policy's own value, and each estimate of the weights, for information."""
    rows: list[tuple[Any, ...]] = []
    for log in logs:
        excluded = sum(log["excluded"].values())
        named = [(f"{one['name']} of the weights", one) for one in log["target"]]
        if log["behaviour"] is not None:
            named.insert(0, ("the logging policy", log["behaviour"]))
        for name, one in named:
            low, high = map(_number, one["interval"])
            value = (_number(one["value"]), f"{low} .. {high}", f"{one['ess'] or 0:.0f}")
            rows.append((log["label"], name, *value, one["n"], excluded))
    level = f"{logs[0]['confidence']:.0%} interval"
    columns = ("log", "estimate", "value per episode", level, "ESS", "episodes", "excluded")
    return (f"{logs[0]['policy_id']} {str(logs[0]['weights'])[:12]}", columns, rows)


def not_used(logs: Sequence[Document]) -> list[str]:
    """What is not used for the estimates of each log, and what their intervals leave out."""
    lines = []
    for log in logs:
        reasons = [
            f"{counted(count, 'episode')} {_label(why)}" for why, count in log["excluded"].items()
        ]
        reasons += [
            f"{counted(count, 'step')} {_label(why)}"
            for why, count in log["not_read"].items()
            if count
        ]
        reasons += [
            f"{name}: {why}" for name, why in {**log["unavailable"], **log["skipped"]}.items()
        ]
        if reasons:
            lines.append(f"{log['label']}: left out: {', '.join(reasons)}")
    if any(one["name"] == "dm" for log in logs for one in log["target"]):
        lines.append("The interval of dm ignores the error of its model.")
    return lines


def _number(value: float | None) -> str:
    """Five digits; None means that an interval has no bound."""
    return "unbounded" if value is None else f"{value:.5g}"


BLOCKS = "▁▂▃▄▅▆▇█"


def status(document: Document) -> None:
    """Print `status`: the five answers, and each policy's rewards over time."""
    for name, question in QUESTIONS.items():
        print(question)
        for line in document["answers"][name] or [{"text": "Nothing."}]:
            print(f"  {printable(line['text'])}")
    for policy in document["policies"]:
        lines = policy["chart"]["lines"]
        if lines:
            each = duration(policy["chart"]["seconds"])
            print(f"{printable(policy['name'])}: {policy['measure']}, one character for {each}")
        means = [point[2] for line in lines for point in line["points"]]
        for line in lines:
            points = line["points"]
            label = f"{version_name(line['version'])}, from {moment(points[0][0] * 1_000_000)}"
            print(f"  {label}: {_blocks(policy['chart'], points, min(means), max(means))}")


def _blocks(chart: Document, points: Sequence[Any], low: float, high: float) -> str:
    """A line as block characters; a blank where there is no point."""
    known = {point[0]: point[2] for point in points}
    found = (known.get(at) for at in range(points[0][0], points[-1][0] + 1, chart["seconds"]))
    spread = (high - low) or 1.0
    return "".join(
        " " if one is None else BLOCKS[round((one - low) / spread * (len(BLOCKS) - 1))]
        for one in found
    )


def versions(document: Document) -> None:
    """Print `versions`: numbered ones, and candidates that were never promoted."""
    rows: list[tuple[Any, ...]] = [
        (
            one["version"],
            ", ".join(_states(document, one)),
            one["candidate"][:12],
            moment(one["created"]),
            one["parent"],
            one["copy_of"],
            one["metrics"].get("rows_trained"),
        )
        for one in document["versions"]
    ]
    promoted = {one["candidate"] for one in document["versions"]}
    rows += [
        (
            None,
            "latest candidate" if one["digest"] == document["latest"] else "candidate",
            one["digest"][:12],
            moment(one["added"]),
            None,
            None,
            one["metrics"].get("rows_trained"),
        )
        for one in sorted(document["candidates"], key=_added)
        if one["digest"] not in promoted
    ]
    columns = ("version", "state", "candidate", "created", "parent", "copy of", "rows trained on")
    table(f"Weights of {document['policy_id']}", columns, rows)
    for one in document["versions"]:
        if one.get("off_chain"):
            print(f"Version {one['version']} is off the chain: {one['off_chain']}")
    runs = {one["metrics"].get("run") for one in (*document["versions"], *document["candidates"])}
    for run in sorted(runs - {None}):
        print(f"Run {run}")
    for version, why in document.get("damaged", {}).items():
        print(f"Version {version} cannot be read: {why}")
    for digest, why in document.get("damaged_candidates", {}).items():
        latest = ", the latest," if digest == document["latest"] else ""
        print(f"Candidate {digest[:12]}{latest} cannot be read: {why}")
    _serving(document)


def _states(document: Document, one: Document) -> list[str]:
    """The states of a version: wanted, served, and as its trainer records it."""
    live, version = document["live"], one["version"]
    wanted = live is not None and live["version"] == version
    serving = sum(one["version"] == version for one in document["served"])
    found = ["wanted"] if wanted else []
    found += [f"served by {serving}"] if serving else []
    if live is not None and live.get("canary_version") == version:
        found.append(f"canary in {live['canary_share']:.3g} of the episodes")
    found += ["latest candidate"] if one["candidate"] == document["latest"] else []
    return [*found, "off the chain"] if one.get("off_chain") else found


def _added(candidate: Document) -> int:
    added: int = candidate["added"]
    return added


def _serving(document: Document) -> None:
    """Print the pin, a restore, and every collector that serves another version."""
    live = document["live"]
    if live is None:
        print("No version is live.")
        return
    if live["pinned"]:
        pin = live["pinned"]
        print(
            f"Pinned by {printable(pin['by'])} since {moment(pin['when'])}: "
            f"{printable(pin['why'])}. `headrace resume` ends it."
        )
    if document["restored"]:
        print(document["restored"])
    if not document["served"]:
        print("No collector is registered.")
    for one in document["served"]:
        if one["generation"] != live["generation"]:
            version = "nothing" if one["version"] < 0 else f"version {one['version']}"
            print(f"Collector {one['collector_id']} serves {version}: {one['why'] or 'not yet'}")


def streams(document: Document) -> None:
    """Print `ls`: the shards, and the open episodes."""
    rows = [
        (
            printable(one["stream"]),
            ", ".join(one["policies"]),
            one["shards"],
            one["parts"],
            one["rows"],
            f"{one['nbytes'] / 1e6:.1f}",
            moment(one["first_ts"]),
            moment(one["last_ts"]),
        )
        for one in document["streams"]
    ]
    columns = ("stream", "policy", "shards", "parts", "rows", "MB", "from", "to")
    if rows:
        table("Streams", columns, rows)
    else:
        print("No shards yet")
    unreadable = sum(one["unreadable"] for one in document["streams"])
    if unreadable:
        print(
            f"{counted(unreadable, 'file')} cannot be read as shards; `headrace verify` says which"
        )
    if document["open_episodes"] is None:
        print(f"Episodes in the journal: unknown: {document['why']}")
    else:
        names = ("policy", "open, or waiting for late rewards")
        table("Episodes in the journal", names, document["open_episodes"].items())
        print(
            f"Steps not in shards yet: {document['open_steps']:,} in these episodes, "
            f"{document['steps_being_written']:,} being written"
        )


def compacted(document: Document, root: str) -> None:
    """Print `compact`: the plan, or what its application has done."""
    done = document.get("applied")
    if done is not None:
        old, made = sum(one["old"] for one in done["made"]), counted(len(done["made"]), "shard")
        deleted = counted(done["deleted"], "shard")
        print(f"Joined {counted(old, 'shard')} to {made}; deleted {deleted}")
        _left(done)
        return
    columns = ("stream", "shards", "rows", "MB")
    rows = [
        (printable(one["stream"]), one["shards"], one["rows"], f"{one['bytes'] / 1e6:.1f}")
        for one in document["merges"]
    ]
    if rows:
        table("To be joined", columns, rows)
    _planned("compact", document, document["deletes"], root)


def _left(done: Document) -> None:
    for place, text in done.get("left", {}).items():
        print(f"left as it is: {printable(place)}: {printable(text)}")


def _planned(command: str, document: Document, deletes: int, root: str) -> None:
    if deletes:
        print(f"To be deleted: {counted(deletes, 'replaced shard')}")
    if document["plan"] is None:
        print("Nothing to do")
    else:
        print(f"headrace {command} --root {printable(root)} --apply {document['plan']}")


def copied(document: Document, where: str) -> None:
    """Print `backup` or `restore`."""
    megabytes, files = f"{document['nbytes'] / 1e6:.1f} MB", counted(document["copied"], "file")
    print(
        f"Copied {files} ({megabytes}) to {printable(where)}; {document['kept']:,} were there, "
        f"{document['removed']:,} removed"
    )
    if document["adopted"]:
        adopted(document)


def adopted(document: Document) -> None:
    """Print `adopt`."""
    done = document["adopted"]
    if done is None:
        print("Adopted nothing: no shard is later than the journal")
        return
    shards = counted(done["shards"], "shard")
    print(
        f"Collector {done['previous']} continues as {done['collector_id']}: recorded {shards} with "
        f"{counted(done['steps'], 'step')}, of which the journal had {done['kept_back']:,}; wrote "
        f"{counted(done['written'], 'step')} to shards; ended {counted(done['closed'], 'episode')}"
    )


def removed(document: Document, root: str) -> None:
    """Print `retain` or the plan of `erase`, or what its application has done."""
    done = document.get("applied")
    if done is not None:
        print(f"Removed {counted(done['removed'], 'row')}; deleted {done['deleted']:,} files")
        _left(done)
        return
    shards = f"{document['whole_shards']:,} whole, {document['rewritten_shards']:,} rewritten"
    print(f"To be removed: {counted(document['rows'], 'row')}; shards: {shards}")
    _planned(document["command"], document, document["deletes"] + len(document["discards"]), root)


def erased(document: Document, root: str) -> None:
    """Print `erase`: the plan or what it has done, and the proof."""
    if "plan" in document:
        removed(document, root)
    if "applied" in document:
        done = document["applied"]
        print(
            f"In the journal: {counted(done['ended'], 'open episode')} ended, "
            f"{counted(done['journal_rows'], 'row')} rewritten"
        )
        if not (done["removed"] or done["ended"]):
            nothing = "There was nothing to erase: check the spelling of the requests"
            print("All of it was erased before" if done["repeated"] else nothing)
    for policy, versions in document.get("trained", {}).items():
        known = ", ".join(map(str, versions))
        print(f"Trained on it: policy {printable(policy)}, versions {known}")
    for number in document.get("unmatched", ()):
        print(f"Request {number}: no shard has such an episode")
    if "proof" in document:
        searched(document["proof"])


def searched(proof: Document) -> None:
    """Print where a proof has looked, and what it has found."""
    looked = ", ".join(f"{count:,} {what}" for what, count in sorted(proof["looked"].items()))
    print(f"Looked for {counted(proof['texts'], 'text')} in {looked}")
    for place, texts in proof["found"].items():
        print(f"found: {printable(place)}: {printable('; '.join(texts))}")
    for place, text in proof["unread"].items():
        print(f"not read: {printable(place)}: {printable(text)}")
    left = "Something was found" if proof["found"] else "Not everything could be read"
    print("Nothing was found" if proof["clear"] else left)


def verified(document: Document) -> None:
    """Print `verify`: counts, notes and findings."""
    columns = ("stream", "shards", "parts", "rows")
    rows = [
        [printable(one["stream"]), *(one[n] for n in columns[1:])] for one in document["streams"]
    ]
    table("Streams", columns, rows)
    known = "unknown" if document["acknowledged"] is None else f"{document['acknowledged']:,}"
    counts = f"in shards {document['in_shards']:,}, in the journal {document['in_journal']:,}"
    for word, name in (("erased", "erased"), ("retained out", "retained_out")):
        counts += f", {word} {document[name]:,}" if document[name] else ""
    print(f"Steps acknowledged: {known}; {counts}")
    if document["earlier"]:
        print(f"In streams of earlier journals: {document['earlier']:,}")
    second = document["second_reader"]
    if second is not None:
        read = f"shards {second['shards']:,}, rows {second['rows']:,}"
        print(f"Read again by {second['reader']}: {read}")
    for note in document["notes"]:
        print(f"note: {printable(note)}")
    for policy_id, checks in document["logs"].items():
        _reviewed(policy_id, checks)
    for moved in document["quarantined"]:
        print(f"moved: {printable(moved)}")
    for found in document["findings"]:
        print(printable(f"{found['kind']}: {found['where']}: {found['text']}"))
    if not document["ok"]:
        print("Some steps are not accounted for, or files are damaged: see the findings.")
    elif document["acknowledged"] is None:
        print("No finding; without a journal it is unknown whether steps are missing.")
    else:
        print("Every step is accounted for exactly once.")


def _reviewed(policy_id: str, checks: Sequence[Document]) -> None:
    """Print the checks of a log that need no candidate."""
    for check in checks:
        said = in_words(f"{check['name']}: {check['sentence']}")
        print(f"log of {printable(policy_id)}: {printable(said)}")


def updated(metrics: Mapping[str, float | None]) -> None:
    """Print one update of a trainer that follows; unknown values (None in JSON) are dashes."""
    shown = ("version", "rows_trained", "policy_lag_mean", "ess", "entropy", "seconds")
    print("  ".join(f"{name} {_short(metrics.get(name))}" for name in shown), flush=True)


def began(version: int) -> None:
    """Print the start of a trainer that follows; below 0 nothing is live."""
    live = (
        f"Version {version} is live: clients can act by it."
        if version >= 0
        else "No version is live."
    )
    print(live, flush=True)


def _short(number: float | None) -> str:
    return "-" if number is None or number != number else f"{number:.4g}"


def child_message(root: Path, message: Document) -> None:
    """Print a message of a child of `headrace up` as a line."""
    if "address" in message:
        print(f"Collecting on {message['address']} into {root}.", flush=True)
    elif "start_version" in message:
        began(message["start_version"])
    elif "version" in message:
        updated(message)
