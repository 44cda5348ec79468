"""The page at `/`, and the part of it that `headrace report` opens with.

    status_page(document)

A function without side effects: the document in, one HTML file out, without other files or a build
step. The page reloads itself every few seconds and replaces what changed.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlencode

from ingest.status.answers import QUESTIONS, moment, named
from ingest.status.chart import NARROW, WIDE, colour, number, reward_chart, sparkline
from storage.wording import counted, duration

Json: TypeAlias = dict[str, Any]

MOST_SHOWN = 8


def status_page(document: Json) -> bytes:
    """Return the page as HTML."""
    policies = document["policies"]
    needs = document["answers"]["needs"]
    first = policies[0] if policies else None
    sections = _section("needs", _needs(needs))
    if first is not None:
        sections += f"<div data-live>{rewards(first, links=True)}</div>"
    others = "".join(map(_other, policies[1:]))
    if others:
        sections += f'<nav aria-label="Policies"><div data-live class=others>{others}</div></nav>'
    answers = "".join(
        _section(name, "".join(map(_line, document["answers"][name])))
        for name in QUESTIONS
        if name != "needs"
    )
    tables = "".join(_counts(title, counts) for title, counts in document["counts"].items())
    more = f"<details><summary>All counts</summary><div data-live>{tables}</div></details>"
    body = f"<main>{sections}<div class=answers>{answers}</div></main>{more}"
    foot = '<p role="status" id="age">Refreshes every 5 seconds.</p>'
    return (
        f"{head('Headrace collector', REFRESH)}<body><h1>Headrace collector</h1>{body}{foot}"
        f"{_SCRIPT}</body></html>"
    ).encode()


def login_page() -> bytes:
    """The page that asks a browser for a token, once."""
    form = (
        "<form id=login><label for=token>A token of this collector, with any scope:</label>"
        "<input id=token type=password autocomplete=current-password required autofocus>"
        "<button>Show the page</button><p role=alert id=why></p></form>"
        "<p>It is kept for at most 12 hours, in a cookie that reads and changes nothing. "
        "<code>headrace token create --scope log NAME</code> makes a token.</p>"
    )
    title = "Headrace collector"
    page = f"{head(title)}<body><h1>{title}</h1><main>{form}</main>{_LOGIN}</body></html>"
    return page.encode()


def head(title: str, more: str = "") -> str:
    """The head of a page, with the style of all pages."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>{more}<style>{STYLE}</style></head>"
    )


def text(value: object) -> str:
    return html.escape(str(value))


def _section(name: str, inside: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-q" tabindex="0">'
        f'<h2 id="{name}-q">{QUESTIONS[name]}</h2><div data-live>{inside}</div></section>'
    )


def _line(line: Json) -> str:
    kind = f' class="{line["kind"]}"' if line["kind"] else ""
    return f"<p{kind}>{_words(line['text'])}</p>"


def _words(given: str) -> str:
    """A text with its commands, which are between backticks, as code."""
    parts = text(given).split("`")
    return "".join(f"<code>{one}</code>" if at % 2 else one for at, one in enumerate(parts))


def _needs(needs: Sequence[Json]) -> str:
    if not needs:
        return '<p class="ok">Nothing.</p>'
    return "<ul>" + "".join(f"<li class=bad>{_words(one['text'])}</li>" for one in needs) + "</ul>"


def _counts(title: str, counts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{text(name.replace('_', ' '))}</th><td>{text(value)}</td></tr>"
        for name, value in counts.items()
    )
    return f"<table><caption>{text(title)}</caption>{rows}</table>"


# --- rewards ------------------------------------------------------------------------------------


def rewards(policy: Json, *, links: bool = False) -> str:
    """The large chart of a policy with its numbers, small series and decisions."""
    chart = policy["chart"]
    title = f"<h2><b>{text(policy['name'])}</b>: {policy['measure']}</h2>"
    if not chart["lines"]:
        return f"{title}<p>No step is in a shard yet: the reward is drawn here once one is.</p>"
    each = f"each point is {duration(chart['seconds'])}, with its 95 % interval; times are UTC"
    shown = [line["version"] for line in chart["lines"]]
    key = "".join(
        f'<span><i style="background:{colour(one)}"></i>{named(one)}</span>' for one in shown
    )
    return (
        f"<div class=top>{title}{_spans(policy) if links else ''}</div>"
        f"<figure>{reward_chart(policy, WIDE)}{reward_chart(policy, NARROW)}"
        f"<figcaption><span class=key>{key}</span> {each}</figcaption></figure>"
        f"<div class=tiles>{_tiles(policy)}</div>{_back(policy['go_back'])}"
        f"{_timeline(policy['decisions'])}"
    )


def _back(command: str | None) -> str:
    """The command of a rollback, because a page changes nothing."""
    return "" if command is None else f"<p>To go back: <code>{text(command)}</code></p>"


def _spans(policy: Json) -> str:
    """Links to the spans of the chart."""
    names = {0: "4 hours", 1: "3 days", 2: "45 days", 3: "all"}
    links = " ".join(
        f'<a href="?{urlencode({"policy": policy["name"], "span": at})}">{names[at]}</a>'
        for at in policy["levels"]
        if len(policy["levels"]) > 1
    )
    return f"<nav aria-label=Span>{links}</nav>" if links else ""


def _tiles(policy: Json) -> str:
    """The numbers beside the chart, with their units."""
    versions = policy["versions"]
    tiles = []
    for role in ("live", "canary", "previous", "before"):
        found = versions.get(role)
        if found is None:
            continue
        title = named(found["version"]) + ("" if role == "before" else f", {role}")
        if role == "canary":
            title += f" in {policy['share']:.3g}"
        tiles.append(_tile(title, found, policy["counts"]))
    tiles += [_small(one) for one in policy["chart"]["small"]]
    return "".join(tiles)


def _tile(title: str, found: Json, counts: str) -> str:
    value = "no data" if found["mean"] is None else number(found["mean"])
    known = found["low"] is not None
    about = f"[{number(found['low'])}, {number(found['high'])}] " if known else ""
    edge = colour(found["version"])
    return (
        f'<div class=tile style="border-color:{edge}"><span>{text(title)}</span>'
        f"<b>{value}</b><small>{about}{counted(found['n'], counts)}</small>{_apart(found)}</div>"
    )


def _apart(found: Json) -> str:
    """How far a version is from the one that it has to beat."""
    against = found["against"]
    if against is None:
        return ""
    kind = "good" if against["low"] > 0 else "worse" if against["high"] < 0 else ""
    values = (f"{against[name]:+.3g}" for name in ("value", "low", "high"))
    return (
        f'<small class="{kind}">{next(values)} [{", ".join(values)}] against '
        f"{named(against['version'])}</small>"
    )


def _small(one: Json) -> str:
    value = number(one["points"][-1][1])
    name = f"{one['name']} {one['unit']}".strip()
    return (
        f"<div class=tile><span>{text(name)}</span><b>{value}</b>"
        f"{sparkline(one['points'], name)}</div>"
    )


def _timeline(decisions: Sequence[Json]) -> str:
    """The latest decisions in words, the latest first."""
    if not decisions:
        return ""
    rows = "".join(
        f"<li><time>{moment(one['decided'] / 1e6)}</time> <b>{text(one['command'])}</b> "
        f"{text(one['outcome'])}<small>{text('; '.join(one['reasons']))}</small></li>"
        for one in reversed(decisions[-MOST_SHOWN:])
    )
    return f"<ol class=decisions aria-label=Decisions>{rows}</ol>"


def _other(policy: Json) -> str:
    """A policy that is not the chosen one: a link with its latest rewards."""
    live = policy["versions"].get("live") or policy["versions"].get("before")
    value = "no data" if live is None or live["mean"] is None else number(live["mean"])
    lines = policy["chart"]["lines"]
    points = sorted((point[0], point[2]) for line in lines for point in line["points"])
    drawn = sparkline(points, policy["measure"]) if points else ""
    link = urlencode({"policy": policy["name"]})
    name = text(policy["name"])
    return f'<a class=tile href="?{link}"><span>{name}</span><b>{value}</b>{drawn}</a>'


STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--ok:#1a7f37;--bad:#b42318;--line:#8884;
--dim:#5b6470;--card:#8881;--before:#6e7681;--others:#a8b0ba;--v0:#7c5cd6;--v1:#2563c9;--v2:#c2570c;
--v3:#0f766e;--v4:#b0256f;--v5:#4d7c0f;--v6:#0e7490;--v7:#a16207}
@media(prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6e9ee;--ok:#4ac26b;--bad:#ff7b72;
--dim:#9aa4b0;--before:#9aa4b0;--others:#5b6470;--v0:#a78bfa;--v1:#60a5fa;--v2:#fb923c;--v3:#2dd4bf;
--v4:#f472b6;--v5:#a3e635;--v6:#22d3ee;--v7:#fbbf24}}
*{box-sizing:border-box}
body{font:16px/1.4 system-ui,sans-serif;margin:0 auto;max-width:76rem;padding:.5rem 1rem;
background:var(--bg);color:var(--fg)}
h1{font-size:1rem;margin:.1rem 0 .4rem;color:var(--dim);font-weight:600}
h2{font-size:1.05rem;margin:0 0 .15rem}h3{font-size:1rem;margin:.8rem 0 .3rem}
a{color:inherit}code{font-size:.9em;overflow-wrap:anywhere;background:var(--card);padding:0 .2em}
p{margin:.1rem 0;overflow-wrap:break-word}ul{margin:.1rem 0;padding-left:1.1rem}
main>*{margin-bottom:.7rem}
section{border:1px solid var(--line);border-radius:.4rem;padding:.4rem .7rem}
:focus-visible{outline:3px solid Highlight}
.ok,.bad{border-left:.3rem solid var(--ok);padding-left:.5rem}.bad{border-color:var(--bad)}
li.bad{border:0;color:var(--bad);padding:0}
.answers{display:grid;gap:.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
.top{display:flex;justify-content:space-between;flex-wrap:wrap;gap:.5rem}
.top nav a{margin-left:.6rem}
.tiles,.others{display:flex;flex-wrap:wrap;gap:.5rem;margin:.4rem 0}
.tile{display:flex;flex-direction:column;flex:1 1 9.5rem;border-left:.3rem solid var(--line);
background:var(--card);border-radius:.3rem;padding:.25rem .6rem;min-width:0;text-decoration:none}
.tile span,.tile small{color:var(--dim);font-size:.8rem}.tile b{font-size:1.5rem;line-height:1.2;
font-variant-numeric:tabular-nums}
figure{margin:0}figcaption{font-size:.85rem;color:var(--dim)}
svg{display:block;width:100%;font-size:12px;font-family:inherit}svg text{fill:var(--dim)}
.narrow{display:none}.spark{height:2.1rem;color:var(--dim)}
@media(max-width:40rem){.wide{display:none}.narrow{display:block}body{padding:.4rem .6rem}
.tile{flex-basis:45%}.bars{font-size:18px}}
.band{opacity:.09}.grid{stroke:var(--line);fill:none}.axis{stroke:var(--dim);fill:none}
.bar{stroke-width:1.5;stroke-dasharray:6 4;fill:none;opacity:.9}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.area{fill:currentColor;opacity:.2}
.err{stroke:currentColor;stroke-width:1.5;fill:none}circle{fill:currentColor}.hit{opacity:0}
.e{text-anchor:end}.m{text-anchor:middle}.b{font-weight:600}svg text.mark{fill:var(--fg)}
.when{stroke:var(--dim);stroke-dasharray:2 3;fill:none}.when.bad{stroke:var(--bad)}
svg text.mark.bad{fill:var(--bad)}svg text.mark.dim{fill:var(--others)}
.key span{margin-right:.8rem;white-space:nowrap}
.key i{display:inline-block;height:.7em;width:.7em;border-radius:50%;margin-right:.3em}
.decisions{list-style:none;margin:.4rem 0;padding:0;font-size:.9rem}
.decisions li{border-top:1px solid var(--line);padding:.15rem 0}.decisions time{color:var(--dim)}
.decisions small{display:block;color:var(--dim)}
details{margin:.6rem 0}.scroll{overflow-x:auto}
table{font-size:.9rem;border-spacing:0}caption{font-weight:600;text-align:left;white-space:nowrap}
th{font-weight:600;white-space:nowrap}th,td{text-align:left;vertical-align:top;
padding:.15rem .8rem .15rem 0;overflow-wrap:break-word;white-space:pre-line}
th[scope=row]{font-weight:400}
.tile .good{color:var(--ok)}.tile .worse{color:var(--bad);font-weight:600}
.dot{stroke:currentColor;stroke-width:6;
stroke-linecap:round}.spark *{vector-effect:non-scaling-stroke}
.bars{max-width:44rem}
form{display:grid;gap:.5rem;max-width:26rem;margin:1rem 0}input,button{font:inherit;padding:.4rem}
#age{font-size:.85rem;color:var(--dim)}"""

REFRESH = "<noscript><meta http-equiv=refresh content=10></noscript>"

_SCRIPT = """<script>
async function again(){const age=document.getElementById("age");try{
const answer=await fetch(location.href,{cache:"no-store"});
if(answer.status===401)return location.reload();if(!answer.ok)throw answer.status;
const fresh=new DOMParser().parseFromString(await answer.text(),"text/html");
const old=document.querySelectorAll("[data-live]");
fresh.querySelectorAll("[data-live]").forEach((one,i)=>{
if(old[i]&&old[i].innerHTML!==one.innerHTML)old[i].innerHTML=one.innerHTML});
age.textContent="As of "+new Date().toLocaleTimeString()+"; refreshes every 5 seconds.";
age.className=""}catch(error){
age.textContent="The collector does not answer: this page is out of date.";age.className="bad"}}
setInterval(again,5000)</script>"""

_LOGIN = """<script>
const form=document.getElementById("login"),why=document.getElementById("why");
form.addEventListener("submit",async event=>{event.preventDefault();
const token=document.getElementById("token").value.trim();
try{const answer=await fetch("/login",{method:"POST",headers:{"Content-Type":"application/json"},
body:JSON.stringify({token})});
if(answer.ok)location.reload();else why.textContent=(await answer.json()).error.message
}catch(error){why.textContent="The collector does not answer."}})</script>"""
