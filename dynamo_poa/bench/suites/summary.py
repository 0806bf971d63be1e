"""A suite's results as Markdown: the verdict, the tables, what is missing, with what it was measured.

Owns: Markdown of tables, the order of a summary's parts.
Does not own: what stands in the tables (tables.py), the page with plots (page.py).
Invariant: pure text of the results; a field cannot break its table.
"""

from collections.abc import Iterator, Sequence

from dynamo_poa.bench.suites import arranged, tables
from dynamo_poa.bench.suites.cells import Result, Stamp
from dynamo_poa.bench.suites.standing import headline, split_headline
from dynamo_poa.bench.suites.tables import Table, Text

MOST_PROBLEMS = 20  # in a summary; the page has all
STARTS = (
    "On the simulator a run begins with cold caches, and all users of a closed loop ask at once: that start "
    "is in the figures. On live graphs users come one by one, and a warm-up goes before. "
    "`random` is on the simulator the KV router at τ without end, for it has no such mode. "
    "A simulated prefill worker that takes several prompts at a time hands them over as late as if it wrote "
    "their answers first, so that TTFT of simulated split fleets is too high, whatever the policy; suite "
    "`allocation` has it take one at a time."
)
CHANCE = (
    "Of twenty comparisons where there is no difference about one looks like one, and the best of many is "
    "partly luck."
)


def markdown(stamp: Stamp, results: Sequence[Result]) -> str:
    """Return the summary."""
    results = arranged.measured(results)
    parts = [f"# Bench: {stamp.suite}", f"{tables.counted(stamp, results)}. Seeds {_seeds(stamp, results)}."]
    parts += verdicts(results)
    parts += [of_table(table, 2) for table in tables.headlines(results)]
    parts += [f"{CHANCE} {STARTS}"]
    parts += [of_table(table, 2) for table in tables.groups(results) if table.leading]
    parts += [of_table(table, 2) for table in tables.split_tables(results)]
    parts += [of_table(table, 2) for table in tables.absolutes(results)]
    for lost in (tables.failures(results), tables.problems(results)):
        if lost is not None:
            parts.append(of_table(lost, 2, most=MOST_PROBLEMS))
    parts += [of_table(tables.fleets(results), 2), of_table(tables.stamp_table(stamp), 2)]
    return "\n\n".join(parts) + "\n"


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """Yield in words what routing was worth, once or by phase, and what the split of the workers was."""
    split, data = split_headline(results), arranged.swept(results)
    if split:
        yield split
    if not split or len(arranged.policy_names(data)) > 1:
        for phase in arranged.phases(data):
            said = headline(data, phase)
            yield f"{arranged.phase_name(phase).capitalize()}: {said}" if phase else said


def of_table(table: Table, level: int, most: int | None = None) -> str:
    """Return a table under its title, a heading of that level; past `most` rows only their number."""
    rows = table.rows if most is None else table.rows[:most]
    lines = [f"{'#' * level} {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines += [_row(table.columns), _row(["---"] * len(table.columns))]
    lines += [_row([_field(field) for field in row]) for row in rows]
    if left := len(table.rows) - len(rows):
        lines += ["", f"... and {left} more."]
    return "\n".join(lines)


def _field(field: Text) -> str:
    text = field.line
    return f"**{text}**" if field.verdict in ("better", "worse") else text


def _row(fields: Sequence[str]) -> str:
    escaped = (field.replace("|", "\\|").replace("\n", " ") for field in fields)
    return f"| {' | '.join(escaped)} |"


def _seeds(stamp: Stamp, results: Sequence[Result]) -> str:
    return ", ".join(map(str, tables.seeds_of(stamp, results)))
