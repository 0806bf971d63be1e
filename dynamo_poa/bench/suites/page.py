"""A suite's results as one page: the verdict, tables, plots, what is missing, with what it was measured.

Owns: the page's layout and style; that it stands alone.
Does not own: what stands in tables (tables.py) and plots (plots.py, maps.py).
Invariant: one file, no script, nothing fetched; readable on light and on dark; what colour says is also
           said in words.
"""

import html
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynamo_poa.bench.suites import arranged, maps, plots, summary, tables, timeline
from dynamo_poa.bench.suites.canvas import Plot
from dynamo_poa.bench.suites.cells import Result, Stamp
from dynamo_poa.bench.suites.tables import Table, Text

STYLE = """
:root {
  color-scheme: light dark; --plot-font: system-ui, sans-serif;
  --page: #fff; --ink: #1c1f24; --faint: #a3a8b0; --soft: #5b626d; --line: #e2e5ea;
  --better: #0068a3; --worse: #b84e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181d; --ink: #e6e8eb; --faint: #6d747f; --soft: #a0a7b2; --line: #303640;
    --better: #6bbdf0; --worse: #f2935a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 .2rem; }
a { color: var(--better); }
nav { font-size: .9rem; margin: .8rem 0; }
nav a { margin-right: 1rem; }
.facts, .note, figcaption { color: var(--soft); margin: .2rem 0 .6rem; }
.note, figcaption { font-size: .87rem; max-width: 95ch; }
.verdict {
  font-size: 1.15rem; line-height: 1.45; max-width: 75ch;
  margin: 1.2rem 0; padding: .1rem 0 .1rem .9rem; border-left: 4px solid var(--better);
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td {
  text-align: left; vertical-align: top; padding: .38rem .7rem .38rem 0;
  border-bottom: 1px solid var(--line);
}
thead th { color: var(--soft); font-weight: 600; border-color: var(--faint); vertical-align: bottom; }
tbody th { font-weight: 600; min-width: 9rem; }
small { display: block; color: var(--soft); font-size: .78rem; white-space: nowrap; }
.better, .worse { font-weight: 650; white-space: nowrap; }
.better { color: var(--better); }
.worse { color: var(--worse); }
.same { color: var(--soft); white-space: nowrap; }
.problems { border-left: 4px solid var(--worse); padding-left: .9rem; }
.stamp td { font-family: ui-monospace, monospace; font-size: .84rem; overflow-wrap: anywhere; }
figure { margin: 1.6rem 0 0; }
figure h3 { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
summary { cursor: pointer; margin: 1rem 0 .3rem; font-weight: 600; }
@media print { main { max-width: none; } figure { break-inside: avoid; } }
"""


def write(stamp: Stamp, results: Sequence[Result], out_html: Path) -> None:
    """Write the page. What was there is replaced at once or not at all.

    Raises:  OSError when it cannot be written.
    """
    half = out_html.with_name(out_html.name + ".part")
    half.write_text(page(stamp, results), encoding="utf-8")
    half.replace(out_html)


def page(stamp: Stamp, results: Sequence[Result]) -> str:
    """Return the page."""
    results = arranged.measured(results)
    drawn = tuple(all_plots(results))
    lost = (tables.problems(results), tables.failures(results))
    sections = [
        ("policies", "Policies", _policies(results)),
        ("plots", "Plots", "".join(map(_figure, drawn)) or "<p>No cells with data to draw.</p>"),
        ("groups", "Group by group", _groups(results)),
        ("missing", "What is missing", _lost([table for table in lost if table is not None])),
        ("fleets", "Fleets", _table(tables.fleets(results), titled=False)),
        (
            "stamp",
            "Build stamp",
            f'<div class="stamp">{_table(tables.stamp_table(stamp), titled=False)}</div>',
        ),
        ("method", "How to read this", _method()),
    ]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{text}</section>' for key, title, text in sections)
    said = "".join(f'<p class="verdict">{_escape(text)}</p>' for text in summary.verdicts(results))
    suite = _escape(stamp.suite)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Bench: {suite}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><main><h1>What routing is worth: {suite}</h1>"
        f'<p class="facts">{_escape(_facts(stamp, results))}</p>{said}<nav>{links}</nav>{body}'
        "</main></body></html>\n"
    )


def all_plots(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield every plot that the results give."""
    data, swept = arranged.done(results), arranged.swept(results)
    yield from itertools.chain(
        plots.forest(swept),
        timeline.over_time(data),
        plots.poa(swept),
        maps.settings(data),
        maps.splits(data),
        plots.latency(swept),
        plots.pareto(swept),
        maps.picks(data),
    )


def _facts(stamp: Stamp, results: Sequence[Result]) -> str:
    engines = {"replay": "Dynamo's simulator", "live": "live graphs of mock workers"}
    used = " and ".join(dict.fromkeys(engines[result.cell.engine] for result in results))
    versions = stamp.machine.packages
    return (
        f"{tables.counted(stamp, results)}; {len(tables.seeds_of(stamp, results))} seeds"
        + f"; on {used}" * bool(used)
        + f"; ai-dynamo {versions.get('ai-dynamo', '-')}, dynamo-poa {versions.get('dynamo-poa', '-')}"
        + f"; {stamp.started_at}"
    )


def _policies(results: Sequence[Result]) -> str:
    return "".join(map(_table, tables.headlines(results))) or "<p>One policy alone: nothing to compare.</p>"


def _groups(results: Sequence[Result]) -> str:
    shown = [*tables.groups(results), *tables.absolutes(results), *tables.split_tables(results)]
    return "".join(
        f"<details{' open' * table.leading}><summary>{_escape(table.title)}</summary>"
        f"{_table(table, titled=False)}</details>"
        for table in shown
    )


def _lost(found: Sequence[Table]) -> str:
    if not found:
        return "<p>Nothing: no cell is void or failed, and no request failed.</p>"
    return f'<div class="problems">{"".join(map(_table, found))}</div>'


def _figure(plot: Plot) -> str:
    return (
        f'<figure id="plot-{plot.name}" class="plot"><h3>{_escape(plot.title)}</h3>'
        f"<figcaption>{_escape(plot.reading)}</figcaption>{plot.svg}</figure>"
    )


def _table(table: Table, *, titled: bool = True) -> str:
    title = f"<h3>{_escape(table.title)}</h3>" if titled else ""
    note = f'<p class="note">{_escape(table.note)}</p>' if table.note else ""
    head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{_escape(row[0].line)}</th>{"".join(map(_field, row[1:]))}</tr>'
        for row in table.rows
    )
    return (
        f'{title}{note}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _field(field: Text) -> str:
    kind = {"better": "better", "worse": "worse", "no difference": "same"}.get(field.verdict, "")
    said = f"{field.main} {field.verdict}" if kind in ("better", "worse") else field.main
    text = f'<span class="{kind}">{_escape(said)}</span>' if kind else _escape(said)
    detail = f"<small>{_escape(field.detail)}</small>" if field.detail else ""
    return f"<td>{text}{detail}</td>"


def _method() -> str:
    return (
        '<p class="note">Cells that differ in nothing but their policy are paired: same fleet, workload, '
        "load and seed. The interval of a change comes from a bootstrap over seeds, widened for their small "
        "number. An interval that holds 0 is no difference. "
        f"{summary.CHANCE} From fewer than three seeds there is no "
        "verdict. "
        f"P99 is over a cell's requests: of a hundred it is about the slowest. {summary.STARTS} "
        "TTFT: time to first token, in an open loop from when the request was due. ITL: mean time between a "
        "request's tokens. E2E: to the last token. Cached: share of the prompts' tokens that no worker had "
        "to compute again. PoA-hat: cost of the routing that took place over that of the best one in "
        "hindsight.</p>"
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
