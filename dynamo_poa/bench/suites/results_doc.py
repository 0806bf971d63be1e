"""`python -m dynamo_poa.bench.suites.results_doc DIR... --out FILE`: what routing is worth, written down.

Owns: the document's parts and their order, the command beside each table, what is said of the disappointing.
Does not own: tables (tables.py), the paper's claims (paper_figures.py) and ours beside them (reproduced.py).
Invariant: generated, never edited; nothing is left out because it disappoints.
"""

import argparse
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from dynamo_poa.bench.suites import affinity, arranged, earned, tables
from dynamo_poa.bench.suites.baselines import TUNING_SUFFIX
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.paper_figures import CLAIMS, PAPER
from dynamo_poa.bench.suites.reproduced import answer
from dynamo_poa.bench.suites.standing import LEADING, percent, standings
from dynamo_poa.bench.suites.store import Contents, read_all
from dynamo_poa.bench.suites.summary import CHANCE, MOST_PROBLEMS, STARTS, of_table, verdicts
from dynamo_poa.bench.suites.tables import Table, Text
from dynamo_poa.bench.suites.written import write
from dynamo_poa.errors import ConfigError

# The suites that readers come for first; others follow in the order of their names.
ORDER = (
    "hetero",
    "workloads-live",
    "splits",
    "workloads",
    "paper-1",
    "paper-2",
    "paper-3",
    "paper-4",
    "caching",
    "smoke",
)
PREAMBLE = (
    "Generated from results by `python -m dynamo_poa.bench.suites.results_doc DIR... --out docs/results.md`; "
    "not edited by hand. All of it was measured on Dynamo's own mock engine: on its simulator in virtual "
    "time, or on live graphs of mock workers. What it says holds for these; real GPUs may differ. "
    "Changes are medians over pairs of cells that differ in nothing but their policy, with 95 % intervals; a "
    f"difference inside the noise is `no difference`. {CHANCE} {STARTS}"
)


def markdown(suites: Sequence[Contents]) -> str:
    """Return the document.

    Args:     suites: one of each suite and model.
    """
    ordered = sorted(suites, key=_order)
    parts = ["# What routing is worth", PREAMBLE, "## In short"]
    parts += [f"**{title(c)}**: {' '.join(verdicts(c.results))}" for c in ordered]
    parts += _earned(ordered)
    paper = {claim.suite for claim in CLAIMS}
    parts.append(_commanded(_beside_the_paper(ordered), 2, _commands(ordered, paper)))
    parts += ["## What disappoints", "\n".join(_disappointing(ordered)) or "Nothing."]
    for contents in ordered:
        parts += _suite(contents)
    parts.append("## Measured with")
    parts += [of_table(_stamp(contents), 3) for contents in ordered]
    return "\n\n".join(parts) + "\n"


def _order(contents: Contents) -> tuple[int, str]:
    suite = contents.stamp.suite
    return (ORDER.index(suite) if suite in ORDER else len(ORDER), title(contents))


def title(contents: Contents) -> str:
    """Return the suite's name, and the timing profiles its workers had."""
    profiles = sorted({result.cell.fleet.profile for result in contents.results} - {""})
    return contents.stamp.suite + f" on {', '.join(profiles)}" * bool(profiles)


def command(contents: Contents) -> str:
    """Return the command that makes the results anew, wherever the reader keeps folders and traces."""
    text = re.sub(rf"--out[ =]{_WORD}", "--out DIR", contents.stamp.command)
    return re.sub(rf"--trace[ =]{_WORD}", lambda found: f"--trace {Path(found[1].strip(chr(39))).name}", text)


def _earned(suites: Sequence[Contents]) -> Iterator[str]:
    """Yield what was asked of the policies that are to be left on; nothing where neither was measured."""
    results = [r for contents in suites if contents.stamp.suite in earned.SUITES for r in contents.results]
    if {result.cell.policy.name for result in results} & {earned.AUTO, earned.MARGINAL}:
        text = _commands(suites, set(earned.SUITES))
        yield _commanded(earned.verdict(results), 2, text)
        if (everywhere := earned.everywhere(results)) is not None:
            yield _commanded(everywhere, 3, text)


def _commands(suites: Sequence[Contents], wanted: Collection[str]) -> str:
    return "`, `".join(command(contents) for contents in suites if contents.stamp.suite in wanted)


def _commanded(table: Table, level: int, text: str) -> str:
    """Return a table with the command that reproduces it under its title."""
    most = MOST_PROBLEMS if table.title in LOST else None
    title, _, rest = of_table(table, level, most=most).partition("\n")
    return f"{title}\n\nReproduce: `{text}`\n{rest}" if text else f"{title}\n{rest}"


_WORD = r"('[^']*'|\S+)"  # of a shell
LOST = ("Void and failed cells", "Failed requests")  # can be very long


def _beside_the_paper(suites: Sequence[Contents]) -> Table:
    by_name: dict[str, tuple[Result, ...]] = {}
    for contents in suites:
        name = contents.stamp.suite
        by_name[name] = (*by_name.get(name, ()), *contents.results)
    rows = []
    for claim in CLAIMS:
        ours = answer(claim, by_name.get(claim.suite, ()))
        of = ", ".join(filter(None, (claim.model.upper(), claim.topology))) or "all"
        reason = claim.reason if ours.verdict in ("no", "partly", "not judged", "new") else ""
        rows.append(
            (
                Text(claim.says),
                Text(of),
                Text(claim.source),
                Text(ours.text),
                Text(ours.verdict),
                Text(reason),
                Text(claim.suite),
            )
        )
    return Table(
        title="The paper's results beside ours",
        columns=(
            "the paper",
            "of",
            "where",
            "ours",
            "reproduced",
            "most likely reason of a difference, or why none is judged",
            "suite",
        ),
        rows=tuple(rows),
        note=f"The paper is {PAPER}. `yes`: the paper's own quantity, outside the noise and as large as it "
        "reports. `partly`: smaller, or another quantity. `not judged`: we have arranged it ourselves: the "
        "workers of paper-1 to paper-4 batch 1,024 tokens, chosen so that they saturate within the paper's "
        "own range of users; live ones run at a tenth of the mock engine's speed, for the machine's sake. "
        "Reasons are what we think likely, not what we have shown.",
    )


def _disappointing(suites: Sequence[Contents]) -> Iterator[str]:
    """Yield what did not come out as one would wish: our policies that are not better, cells without data."""
    for contents in suites:
        name, results = title(contents), contents.results
        for line in _not_better(results):
            yield f"- {name}: {line}"
        if (failures := tables.failures(results)) is not None:
            policies = ", ".join(dict.fromkeys(row[0].main for row in failures.rows))
            yield f"- {name}: requests failed under {policies}."
        lost = [result for result in results if result.state != "done"]
        if lost:
            void = sum(result.state == "void" for result in lost)
            yield f"- {name}: {void} cells void and {len(lost) - void} failed, of {contents.stamp.cells}."
        if contents.stamp.cells > len(results):
            yield f"- {name}: {contents.stamp.cells - len(results)} cells were not run."
        if contents.problems:
            yield f"- {name}: {len(contents.problems)} lines of the file could not be read."


def _not_better(results: Sequence[Result]) -> Iterator[str]:
    data = arranged.swept(results)
    adaptive = {r.cell.policy.name for r in data if r.cell.policy.plugin == "active"}
    default = arranged.default_policy(data)
    for phase in arranged.phases(data):
        for standing in standings(data, phase):
            found = standing.against.get(phase + LEADING)
            if standing.policy in adaptive and found is not None and found.verdict != "better":
                change = percent(found.ratio) if found.verdict == "worse" else found.verdict
                where = f" in the {arranged.phase_name(phase)}" if phase else ""
                yield f"our {standing.policy} against {default} by mean TTFT{where}: {change}."


def _suite(contents: Contents) -> Iterator[str]:
    results, text = contents.results, command(contents)
    yield f"## {title(contents)}"
    yield f"{tables.counted(contents.stamp, results)}. " + " ".join(verdicts(results))
    shown = [*affinity.told(results), *tables.headlines(results)]
    shown += [table for table in tables.groups(results) if table.leading]
    shown += [*tables.split_tables(results), *tables.absolutes(results)]
    shown.append(tables.fleets(results))
    shown += [lost for lost in (tables.failures(results), tables.problems(results)) if lost is not None]
    for table in shown:
        yield _commanded(table, 3, text)


def _stamp(contents: Contents) -> Table:
    table = tables.stamp_table(contents.stamp)
    rows = tuple(row for row in table.rows if row[0].main not in ("suite", "command"))
    return Table(
        title=title(contents),
        columns=table.columns,
        rows=((Text("command"), Text(command(contents))), *rows),
    )


def read(folders: Sequence[Path]) -> tuple[Contents, ...]:
    """Return the suites in the folders; one may be there once for each model.

    Raises:   ConfigError when there is none, or one of them twice.
    """
    found = [
        msgspec.structs.replace(contents, results=arranged.measured(contents.results))
        for folder in folders
        for contents in read_all(folder)
        if not contents.stamp.suite.endswith(TUNING_SUFFIX)
    ]
    names = [title(contents) for contents in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [f"{name}: in more than one folder, must be in one" for name in twice]
    if not found:
        problems.append(f"{', '.join(map(str, folders))}: must hold results, there are none")
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def main(argv: list[str] | None = None) -> int:
    """Write the document; return the exit status: 2 when there is nothing to write it from."""
    parser = argparse.ArgumentParser(
        prog="dynamo_poa.bench.suites.results_doc", description="Write down what the results say"
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="of `dynamo-poa bench run --out DIR`"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="Markdown file to write")
    arguments = parser.parse_args(argv)
    return write(arguments.out, lambda: markdown(read(arguments.folders)))


if __name__ == "__main__":
    sys.exit(main())
