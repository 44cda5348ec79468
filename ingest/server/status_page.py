"""The page at `/`: five questions, answered on its first screen.

    status_page(facts)

Which version is live and which is served; is it better than the previous one; does data arrive;
does training continue; what needs an operator. A function without side effects: facts in, one HTML
file out, without other files or a build step. The page reloads itself every few seconds and
replaces the answers that changed.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingest.collector.version_metrics import Moments
from storage.wording import counted

NORMAL = 1.959964
"""The 97.5 % quantile of the standard normal distribution."""
NOTHING = "nothing"
FEWEST = 30
"""The least episodes of each version, for a difference to be shown."""


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """The facts about one policy. `roles`: live, previous, canary -> version and returns."""

    name: str
    served: str  # "version 7", NOTHING
    wanted: str
    why: str | None = None  # why the wanted version is not served
    held: str | None = None  # who prevents others from publishing, and why
    share: float = 0.0  # the canary's
    roles: Mapping[str, tuple[int | None, Moments]] = field(default_factory=dict)
    trainer: bool | None = None  # None: never seen
    rows_trained: float = 0.0
    retrying: float = 0.0
    stalled: float = 0.0  # seconds that clients have waited for weights
    hint: str = ""  # the trainer's, if learning does not go on


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a collector.

    `needs`: conditions for an operator; `counts`: the time that counts cover -> name -> value.
    """

    policies: Sequence[PolicyFacts]
    steps: int
    in_shards: int
    open: int
    awaiting: int  # ended episodes that wait for late rewards
    silent: float | None  # seconds since the last accepted event; None: none since the start
    refused: int
    full: bool  # whether events are refused because the disk has no space
    needs: Sequence[str]
    counts: Mapping[str, Mapping[str, object]]


def status_page(facts: Facts) -> bytes:
    """Return the page as HTML."""
    answers = {
        "live": ("What is live?", "".join(map(_live, facts.policies)) or _line("No policy.")),
        "better": ("Is it better than the previous one?", "".join(map(_better, facts.policies))),
        "data": ("Does data arrive?", _data(facts)),
        "learning": ("Is training running?", "".join(map(_learning, facts.policies))),
        "needs": ("What needs attention?", _needs(facts.needs)),
    }
    sections = "".join(
        f'<section id="{name}" aria-labelledby="{name}-q" tabindex="0">'
        f'<h2 id="{name}-q">{question}</h2><div data-live>{answer}</div></section>'
        for name, (question, answer) in answers.items()
    )
    tables = "".join(_counts(title, counts) for title, counts in facts.counts.items())
    more = f"<details><summary>All counts</summary><div data-live>{tables}</div></details>"
    body = f"<h1>Headrace collector</h1><main>{sections}</main>{more}"
    foot = '<p role="status" id="age">Refreshes every 5 seconds.</p>'
    return f"{_HEAD}<body>{body}{foot}{_SCRIPT}</body></html>".encode()


def _text(value: object) -> str:
    return html.escape(str(value))


def _line(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def _counts(title: str, counts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{_text(name.replace('_', ' '))}</th><td>{_text(value)}</td></tr>"
        for name, value in counts.items()
    )
    return f"<table><caption>{_text(title)}</caption>{rows}</table>"


def _live(one: PolicyFacts) -> str:
    same = one.wanted == one.served and one.why is None
    nothing = same and one.served == NOTHING
    served = "nothing is published" if nothing else f"{_text(one.served)} is served"
    text = f"<b>{_text(one.name)}</b>: {served}"
    text += "" if nothing else ", as wanted" if same else f"; {_text(one.wanted)} is wanted"
    text += f" ({_text(one.why)})" if one.why else ""
    canary = one.roles.get("canary", (None, Moments()))[0]
    if canary is not None:
        text += f"; canary: version {canary} in {one.share:.3g} of the episodes"
    text += f"; pinned by {_text(one.held)}" if one.held else ""
    return _line(text, "ok" if same else "bad")


def _better(one: PolicyFacts) -> str:
    """The difference of two means with its 95 % interval, for information only."""
    role = "live" if one.roles.get("canary", (None,))[0] is None else "canary"
    bar = "previous" if role == "live" else "live"
    version, mine = one.roles.get(role, (None, Moments()))
    before, other = one.roles.get(bar, (None, Moments()))
    name = f"<b>{_text(one.name)}</b>: "
    if version is None or before is None:
        return _line(f"{name}there is no earlier version to compare with")
    counts = f"n = {mine.n:,} and {counted(other.n, 'episode')}"
    versions = f"version {version} minus version {before}"
    if min(mine.n, other.n) < FEWEST:
        few = f"fewer than {FEWEST} episodes of one of the two since this collector started"
        return _line(f"{name}{versions}: cannot tell, {few} ({counts})")
    apart = mine.mean - other.mean
    radius = NORMAL * math.sqrt(mine.variance / mine.n + other.variance / other.n)
    low, high = apart - radius, apart + radius
    word, kind = ("better", "ok") if low > 0 else ("worse", "bad") if high < 0 else ("no clear", "")
    verdict = f"{word} difference" if not kind else f"it looks {word}"
    figures = f"{apart:+.4g} [{low:+.4g}, {high:+.4g}] per episode, {counts} since the start"
    note = (
        "they were live one after the other, so changes over time contribute"
        if role == "live"
        else "<code>headrace canary</code> gives the verdict"
    )
    return _line(f"{name}{versions}: {verdict}, {figures}; {note}", kind)


def _data(facts: Facts) -> str:
    arrives = facts.silent is not None and facts.silent < 60 and not facts.full
    when = "no event since the start" if facts.silent is None else _ago(facts.silent)
    waiting = f", {facts.awaiting:,} more waiting for late rewards" if facts.awaiting else ""
    rest = (
        f"{counted(facts.open, 'open episode')}{waiting}. "
        f"Since this collector started: {counted(facts.refused, 'event')} refused. "
        f"Over the journal's whole life: {counted(facts.steps, 'step')} taken, "
        f"{facts.in_shards:,} of them in shards"
    )
    yes = "Yes" if arrives else "No, the disk is full" if facts.full else "Not now"
    return _line(f"{yes}: {when}. {rest}.", "ok" if arrives else "")


def _ago(seconds: float) -> str:
    if seconds < 2:
        return "the last event came just now"
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            count = int(seconds // size)
            return f"the last event came {counted(count, unit)} ago"
    return ""


def _learning(one: PolicyFacts) -> str:
    name = f"<b>{_text(one.name)}</b>: "
    if one.trainer is None:
        return _line(f"{name}no trainer follows it")
    retrying = f", retrying {counted(one.retrying, 'shard')}" if one.retrying else ""
    stalled = f"; clients have waited {one.stalled:.0f} s for weights" if one.stalled else ""
    if one.trainer:
        hint = f"; {_text(one.hint)}" if one.hint else ""
        rest = f"{counted(one.rows_trained, 'row')} trained on{retrying}{stalled}{hint}"
        return _line(f"{name}yes, {rest}", "bad" if one.stalled > 10 or hint else "ok")
    return _line(f"{name}its trainer has stopped{stalled}", "bad")


def _needs(needs: Sequence[str]) -> str:
    if not needs:
        return _line("Nothing.", "ok")
    return f"<ul>{''.join(f'<li class=bad>{_text(one)}</li>' for one in needs)}</ul>"


_HEAD = """<!doctype html><html lang=en><head><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1"><title>Headrace collector</title>
<noscript><meta http-equiv=refresh content=10></noscript><style>
:root{color-scheme:light dark;--ok:#1a7f37;--bad:#b42318;--line:#8886}
@media(prefers-color-scheme:dark){:root{--ok:#4ac26b;--bad:#ff7b72}}
body{font:16px/1.4 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:.5rem 1rem}
h1{font-size:1.15rem;margin:.3rem 0}h2{font-size:1rem;margin:0 0 .15rem}
#needs{grid-column:1/-1}main{display:grid;gap:.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
section{border:1px solid var(--line);border-radius:.4rem;padding:.4rem .7rem}
section:focus-visible,summary:focus-visible{outline:3px solid Highlight}
p{margin:.1rem 0;overflow-wrap:anywhere}ul{margin:.1rem 0;padding-left:1.1rem}
.ok,.bad{border-left:.3rem solid var(--ok);padding-left:.5rem}.bad{border-color:var(--bad)}
li.bad{border:0;color:var(--bad);padding:0}details{margin:.6rem 0}
table{font-size:.9rem;border-spacing:0}caption{font-weight:600;text-align:left;white-space:nowrap}th{font-weight:400;text-align:left;padding-right:1rem}
#age{font-size:.85rem;opacity:.8}</style></head>"""

_SCRIPT = """<script>
async function again(){const age=document.getElementById("age");try{
const answer=await fetch(location.href,{cache:"no-store"});if(!answer.ok)throw answer.status;
const fresh=new DOMParser().parseFromString(await answer.text(),"text/html");
const old=document.querySelectorAll("[data-live]");
fresh.querySelectorAll("[data-live]").forEach((one,i)=>{
if(old[i]&&old[i].innerHTML!==one.innerHTML)old[i].innerHTML=one.innerHTML});
age.textContent="As of "+new Date().toLocaleTimeString()+"; refreshes every 5 seconds.";
age.className=""}catch(error){
age.textContent="The collector does not answer: this page is out of date.";age.className="bad"}}
setInterval(again,5000)</script>"""
