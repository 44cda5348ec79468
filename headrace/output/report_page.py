"""The pages of `headrace report` and `evaluate --html`: each is one HTML file that opens offline.

Tables are those of the terminal (`headrace.output.results`), charts are inline SVG. Nothing is
fetched, and there are no scripts.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headrace.output.console import moment
from headrace.output.results import (
    Document,
    Table,
    armed,
    estimated,
    judgements,
    not_used,
    verdicts,
)
from ingest.status.answers import PolicyFacts, policy_document
from ingest.status.chart import colour, sparkline
from ingest.status.decision_words import decided, in_words
from ingest.status.page import head, rewards
from storage.wording import counted

WIDTH, HEIGHT, MARGIN = 640, 180, 48
MOST_BARS = 60
OTHERS = "var(--others)"
MOST_SERIES = 7
MOST_CURVES = 12
MOST_DECISIONS = 200
SETTINGS = ("seed", "evaluation_share", "cluster", "config", "algorithm", "chain", "update")
"""Entries of a version's metrics that are settings, and get no curve."""
METRICS = {
    "algorithm": "algorithm",
    "chain": "chain of checkpoints",
    "clip": "clip range of the ratios",
    "clip_fraction": "share of clipped ratios",
    "clipped_share": "share of clipped importance weights",
    "cluster": "held out together",
    "config": "settings",
    "entropy": "entropy of the action distributions",
    "ess": "effective sample size of the training rows",
    "evaluation_share": "share held out",
    "explained_variance": "variance of the returns that the value function explains",
    "gap": "conservative gap",
    "kl_k1": "KL divergence from the behaviour policy (k1)",
    "kl_k3": "KL divergence from the behaviour policy (k3)",
    "left_out": "rows left out",
    "loss": "training loss",
    "lr": "learning rate",
    "mean_value": "mean value of the logged actions",
    "mean_weight": "mean importance weight of the training rows",
    "policy_lag_max": "policy lag, largest",
    "policy_lag_mean": "policy lag, mean",
    "rows": "rows of the update",
    "rows_trained": "rows trained on",
    "stale_kl": "KL divergence from the behaviour policy before the update",
    "td_error": "temporal-difference error",
    "train_loss": "training loss, over all rows",
    "train_mean_reward": "mean reward of the training rows",
    "train_snips": "estimate (snips) on the training rows, not a verdict",
    "value_loss": "loss of the value function",
}
"""Words for the names of metrics; in all other names, underscores are replaced by spaces."""
SOURCES = {"imported": "var(--before)", "logged": "var(--v1)", "on policy": "var(--v2)"}
"""The colours of sources."""


def report_page(document: Document, checks: Sequence[Document] = ()) -> str:
    """Return the page for an `overview` document and the checks of the log."""
    sections = (
        ("Now", _now(document)),
        ("Data over time", _data(document["data"])),
        ("Checks of the log", _checks(checks)),
        ("Training curves", _curves(document["versions"])),
        ("Decisions", _decisions(document["decisions"])),
        ("Estimates with diagnostics", _estimates(document["decisions"], document["root"])),
        ("Not readable", _damaged(document)),
    )
    body = "".join(f"<section><h2>{title}</h2>{text}</section>" for title, text in sections if text)
    made = f"{_text(document['root'])}, as of {moment(document['made'])} UTC"
    opening = rewards(policy_document(_facts(document), root=str(document["root"])))
    title = f"Headrace: {document['policy_id']}"
    return _page(title, f"<main>{opening}</main>{body}<p>{made}</p>")


def _facts(document: Document) -> PolicyFacts:
    """What the status page would show of the policy."""
    live = document["live"] or {}
    parents = {one["version"]: one.get("parent") for one in document["versions"]}
    return PolicyFacts.at_rest(
        document["policy_id"],
        live,
        parents.get(live.get("version")),
        document["history"],
        document["decisions"],
    )


def evaluation_page(logs: Sequence[Document]) -> str:
    """Return the page of `evaluate`: verdicts, bars, checks, and the estimates of each log."""
    title, *_ = estimated(logs)
    paragraphs = "".join(f"<p>{_text(line)}</p>" for line in verdicts(logs))
    return _page(title, paragraphs + _evaluated(logs))


def _page(title: str, body: str) -> str:
    return f"{head(title)}<body><h1>{_text(title)}</h1>{body}</body></html>\n"


def _evaluated(logs: Sequence[Document]) -> str:
    tables = "".join(map(_titled, (*judgements(logs), estimated(logs))))
    return tables + "".join(f"<p>{_text(line)}</p>" for line in not_used(logs))


def _titled(given: Table) -> str:
    title, columns, rows = given
    return f"<h3>{_text(title)}</h3>{_table(columns, rows)}"


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th scope=col>{_text(name)}</th>" for name in columns)
    lines = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>"


def _now(document: Document) -> str:
    live = document["live"]
    if live is None:
        return "<p>Nothing is live.</p>"
    text = f"Version {live['version']} is live, in generation {live['generation']}"
    if live["canary_version"] is not None:
        text += f"; version {live['canary_version']} in {live['canary_share']:.3g} of the episodes"
    pin = live.get("pinned")
    text += f"; pinned by {pin['by']}: {pin['why']}" if pin else ""
    served = [
        (one["collector_id"], one["version"], one["generation"], one["why"])
        for one in document["served"]
    ]
    names = ("collector", "serves version", "generation", "why not the live version")
    table = _table(names, served) if served else "<p>No collector is registered.</p>"
    return f"<p>{_text(text)}.</p>{table}"


def _damaged(document: Document) -> str:
    lost = {**document["damaged"], **document["data"]["skipped"]}
    return _table(("what", "why"), lost.items()) if lost else ""


# --- data ---------------------------------------------------------------------------------------


def _data(data: Document) -> str:
    if not data["bars"]:
        return f"<p>No steps{': ' + _text(data['why']) if data['why'] else ''}.</p>"
    bars = data["bars"]

    def version(one: Document) -> str:
        return "no version" if one["version"] < 0 else f"version {one['version']}"

    caption = f"{counted(data['steps'], 'step')}, by the time at which they arrived."
    if bars and min(one["version"] for one in bars) < 0:
        caption += " No version: the step was imported, or no published version chose its action."
    parts = [f"<p>{caption}</p>"]
    versions = {version(one): colour(one["version"]) for one in bars}
    for title, key, colours in (("version", version, versions), ("source", _source, SOURCES)):
        parts.append(f"<h3>Steps by {title}</h3>{_stacked(bars, key, colours)}")
    return "".join(parts) + _by_version(bars, version)


def _checks(checks: Sequence[Document]) -> str:
    """What the log says of itself, whatever policy is judged by it."""
    lines = (in_words(f"{one['name']}: {one['sentence']}") for one in checks)
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _source(one: Document) -> str:
    """Who chose the actions, in words."""
    source = str(one["source"])
    return {"replayed": "imported", "on_policy": "on policy"}.get(source, source)


def _by_version(bars: Sequence[Document], version: Callable[[Document], str]) -> str:
    totals: dict[tuple[int, str, str], list[float]] = {}
    for one in bars:
        total = totals.setdefault((one["version"], version(one), _source(one)), [0, 0.0, 0])
        for i, name in enumerate(("steps", "rewards", "episodes")):
            total[i] += one[name]
    latest = sorted(totals.items(), reverse=True)[:50]
    rows = [
        (name, source, int(steps), int(episodes), rewards / steps if steps else None)
        for (_, name, source), (steps, rewards, episodes) in latest
    ]
    return _table(("version", "source", "steps", "episodes ended", "reward a step"), rows)


def _stacked(
    bars: Sequence[Document], name_of: Callable[[Document], str], colours: Mapping[str, str]
) -> str:
    """Stacked bars of steps over time; the series with the most steps have their own colours."""
    begin, end = bars[0]["hour"], bars[-1]["hour"]
    hours = (end - begin) // 3_600_000_000 + 1
    width = max(1, math.ceil(hours / MOST_BARS))
    count = math.ceil(hours / width)
    totals: dict[str, int] = {}
    for one in bars:
        totals[name_of(one)] = totals.get(name_of(one), 0) + one["steps"]
    names = sorted(totals, key=lambda name: -totals[name])[:MOST_SERIES]
    if len(totals) > len(names):
        names.append("others")
    stacks = [dict.fromkeys(names, 0) for _ in range(count)]
    for one in bars:
        name = name_of(one) if name_of(one) in names else "others"
        stacks[(one["hour"] - begin) // 3_600_000_000 // width][name] += one["steps"]
    top = max(sum(stack.values()) for stack in stacks) or 1
    each = (WIDTH - MARGIN) / count
    drawn = []
    for i, stack in enumerate(stacks):
        base = HEIGHT - 20.0
        for name in names:
            tall = stack[name] / top * (HEIGHT - 40)
            base -= tall
            if tall:
                drawn.append(
                    f'<rect x="{MARGIN + i * each:.1f}" y="{base:.1f}" width="{each * 0.9:.1f}" '
                    f'height="{tall:.1f}" style="fill:{colours.get(name, OTHERS)}">'
                    f"<title>{_text(name)}: "
                    f"{counted(stack[name], 'step')} from "
                    f"{moment(begin + i * width * 3_600_000_000)}</title></rect>"
                )
    key = "".join(
        f'<span><i style="background:{colours.get(name, OTHERS)}"></i>{_text(name)}</span>'
        for name in names
    )
    unit = f"each bar is {width} h of arrival" if width > 1 else "each bar is an hour of arrival"
    labels = _axes(0.0, float(top), moment(begin), moment(end))
    return f"{_svg(labels + ''.join(drawn), f'Steps, {unit}')}<p class=key>{key} ({unit})</p>"


def _svg(inside: str, label: str) -> str:
    box = f'class="bars" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg {box} role="img" aria-label="{_text(label)}">{inside}</svg>'


def _axes(low: float, high: float, begin: str, end: str) -> str:
    return (
        f'<text x="{MARGIN - 6}" y="24" text-anchor="end">{_tick(high)}</text>'
        f'<text x="{MARGIN - 6}" y="{HEIGHT - 20}" text-anchor="end">{_tick(low)}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}">{_text(begin)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{_text(end)}</text>'
        f'<path d="M{MARGIN} 20V{HEIGHT - 20}H{WIDTH}" fill="none" stroke="currentColor" '
        'stroke-opacity=".4"/>'
    )


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.3g}"


# --- training -----------------------------------------------------------------------------------


def _curves(versions: Sequence[Document]) -> str:
    """Each number that changes among the versions' metrics, over the versions that were trained."""
    versions = [one for one in versions if one.get("copy_of") is None]  # the others rolled back
    if not versions:
        return "<p>No versions.</p>"
    found: dict[str, list[tuple[int, float]]] = {}
    for one in versions:
        for name, value in one["metrics"].items():
            if name in SETTINGS:
                continue
            if type(value) in (int, float) and math.isfinite(value):
                found.setdefault(name, []).append((one["version"], float(value)))
    changing = [item for item in sorted(found.items()) if len({value for _, value in item[1]}) > 1]
    last = versions[-1]
    share = "PPO" in str(last["metrics"].get("algorithm"))
    words = {**METRICS, "ess": f"{METRICS['ess']}, as a share"} if share else METRICS

    def named(name: str) -> str:
        return words.get(name, name.replace("_", " "))

    drawn = "".join(
        f"<div class=tile><span>{_text(named(name))}</span><b>{_text(points[-1][1])}</b>"
        f"<small>n = {counted(len(points), 'version')}</small>"
        f"{sparkline(points, named(name))}</div>"
        for name, points in changing[:MOST_CURVES]
    )
    metrics = last["metrics"].items()
    numbers = {named(name): _value(value) for name, value in metrics if value != ""}
    table = _table((f"metrics of version {last['version']}", "value"), numbers.items())
    if not numbers:
        return "<p>The versions have no metrics.</p>"
    return f"<div class=tiles>{drawn}</div>{table}"


def _value(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{name} {json.dumps(one)}" for name, one in value.items())
    return value if value is None or type(value) in (str, int, float) else json.dumps(value)


# --- judgements ---------------------------------------------------------------------------------


def _decisions(decisions: Sequence[Document]) -> str:
    """The decisions about candidates, the latest first."""
    if not decisions:
        return "<p>Nothing was decided.</p>"
    latest = sorted(decisions, key=lambda one: one["decided"], reverse=True)[:MOST_DECISIONS]
    rows = []
    for one in latest:
        command, outcome, reasons = decided(one)
        candidate = str(one["candidate"])[:12]
        rows.append((moment(one["decided"]), command, candidate, outcome, "\n".join(reasons)))
    return _table(("decided", "command", "candidate", "outcome", "why"), rows)


def _estimates(decisions: Sequence[Document], root: str) -> str:
    judged = [one for one in reversed(decisions) if one.get("target") or one.get("returns")][:20]
    return "".join(
        f"<details{' open' if i == 0 else ''}><summary>{moment(one['decided'])}: "
        f"{_text(str(one['candidate'])[:12])}, {_text(one['verdict'])}</summary>"
        f"{_judged(one, Path(root).name)}"
        "</details>"
        for i, one in enumerate(judged)
    )


def _judged(one: Document, label: str) -> str:
    """A canary's arms, or the gate's results by log, labelled as in `evaluate`."""
    if one.get("returns"):
        return _titled(armed(one))
    return _evaluated([{"label": label, "weights": one["candidate"], **one}])
