"""The tables that the page, the summary and the results document share, before they are HTML or Markdown.

Owns: which tables results give, their columns, what stands in each field.
Does not own: markup (page.py, summary.py), comparisons (paired.py, standing.py), plots.
Invariant: what was not measured is `-`; a difference inside the noise is `no difference`;
           void and failed cells are in no table but their own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from dynamo_poa.bench.suites import arranged, baselines
from dynamo_poa.bench.suites.cells import Fleet, Result, Stamp
from dynamo_poa.bench.suites.paired import Comparison, Interval, typical
from dynamo_poa.bench.suites.standing import COMPARED, LEADING, by_group, cached, percent, standings
from dynamo_poa.serve.show import UNKNOWN

ABSOLUTE = {
    "ttft_mean_s": "TTFT mean (s)",
    "ttft_p99_s": "TTFT P99 (s)",
    "itl_p99_s": "ITL P99 (s)",
    "e2e_p99_s": "E2E P99 (s)",
    "throughput_rps": "throughput (requests/s)",
    "cached_frac": "cached",
    "poa_hat": "PoA-hat",
}
SPLIT_FIGURES = ("ttft_mean_s", "itl_p99_s", "e2e_mean_s", "throughput_rps")
LAST_LINES, REASON_CHARS = "; last lines:", 240
DETAILED = ("ttft_mean_s", "ttft_p99_s", "throughput_rps")


class Text(msgspec.Struct, frozen=True):
    """One field: what it says, the small print under it, and whether it is good news."""

    main: str
    detail: str = ""
    verdict: str = ""

    @property
    def line(self) -> str:
        """Return it in one line."""
        return f"{self.main} ({self.detail})" if self.detail else self.main


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table; the first column names what a row is of. `leading` ones are shown unasked."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    note: str = ""
    leading: bool = True


def compared(found: Comparison | None) -> Text:
    """Return a comparison as a change in percent, its interval as small print."""
    if found is None:
        return Text(UNKNOWN)
    if found.ratio is None or found.low is None or found.high is None:
        return Text(found.verdict, found.reason)
    interval = f"{percent(found.low)} to {percent(found.high)}"
    main = found.verdict if found.verdict == "no difference" else percent(found.ratio)
    return Text(main, interval, found.verdict)


def typical_text(interval: Interval | None, figure: str) -> Text:
    """Return a median over seeds, its interval as small print."""
    if interval is None:
        return Text(UNKNOWN)
    if interval.low is None or interval.high is None:
        return Text(value_text(interval.median, figure))
    low, high = (value_text(max(value, 0.0), figure) for value in (interval.low, interval.high))
    return Text(value_text(interval.median, figure), f"{low} to {high}")


def value_text(value: float, figure: str) -> str:
    """Return a figure with three digits that count."""
    if figure.endswith("_frac"):
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def headlines(results: Sequence[Result]) -> Iterator[Table]:
    """Yield policies against the default over everything, phase by phase where loads have phases."""
    data = arranged.swept(results)
    default, phases = arranged.default_policy(data), arranged.phases(data)
    listed = {phase: standings(data, phase) for phase in phases}
    keys = [f for f in COMPARED if any(p + f in s.against for p in phases for s in listed[p])]
    if default is None or not keys:
        return
    rows = list[tuple[Text, ...]]()
    for phase in phases:
        measure, share = [Text("0", "the measure")] * len(keys), _share(cached(data, default, phase))
        rows.append((_named(phase, default), *measure, share, Text("")))
        rows += [
            (
                _named(phase, s.policy),
                *(compared(s.against.get(phase + key)) for key in keys),
                _share(s.cached),
                Text(f"{s.better} better, {s.worse} worse", f"of {s.groups}"),
            )
            for s in listed[phase]
        ]
    yield Table(
        title=f"Policies against {default}",
        columns=("policy", *(COMPARED[key] for key in keys), "cached", "groups by mean TTFT"),
        rows=tuple(rows),
        note="Change of the median over pairs with the same fleet, workload, load and seed, with its 95 % "
        "interval. Lower is better but for throughput. A group is one fleet, workload and load."
        + _of_best(results),
    )


def _of_best(results: Sequence[Result]) -> str:
    said = baselines.tuned_unlike(result.cell for result in arranged.done(results))
    return f" {said}" * bool(said)


def _named(phase: str, name: str) -> Text:
    return Text(f"{phase.rstrip('.')}: {name}" if phase else name)


def _share(interval: Interval | None) -> Text:
    return Text(UNKNOWN if interval is None else value_text(interval.median, "cached_frac"))


def groups(results: Sequence[Result]) -> Iterator[Table]:
    """Yield policies against the default group by group, a table a figure; the longer side goes down."""
    data = arranged.swept(results)
    default = arranged.default_policy(data)
    for figure in DETAILED:
        found = {
            _named(phase, group): row
            for phase in arranged.phases(data)
            for group, row in by_group(data, phase + figure).items()
        }
        names = [name for name in arranged.policy_names(data) if any(name in row for row in found.values())]
        if not names:
            continue
        if len(found) < len(names):
            columns = ("policy", *(group.main for group in found))
            rows = [(Text(n), *(compared(row.get(n)) for row in found.values())) for n in names]
        else:
            columns = ("fleet | workload | load", *names)
            rows = [(group, *(compared(row.get(n)) for n in names)) for group, row in found.items()]
        yield Table(
            title=f"{COMPARED[figure]} against {default}, group by group",
            columns=columns,
            rows=tuple(rows),
            note=_of_best(results).strip(),
            leading=figure == LEADING,
        )


def absolutes(results: Sequence[Result]) -> Iterator[Table]:
    """Yield the default's own figures, so that changes can be turned into seconds."""
    data = arranged.swept(results)
    default, phases = arranged.default_policy(data), arranged.phases(data)
    own = [result for result in data if result.cell.policy.name == default]
    keys = [figure for figure in ABSOLUTE if any(p + figure in r.figures for p in phases for r in own)]
    by_name = arranged.grouped(own, lambda result: result.cell.group)
    if keys:
        yield Table(
            title=f"{default} in absolute figures",
            columns=("fleet | workload | load", *(ABSOLUTE[key] for key in keys)),
            rows=tuple(
                (_named(phase, group), *(typical_text(typical(cells, phase + key), key) for key in keys))
                for phase in phases
                for group, cells in by_name.items()
            ),
            note=f"Medians over seeds with 95 % intervals. {_least_requests(own)}".strip(),
            leading=False,
        )


def _least_requests(results: Sequence[Result]) -> str:
    """Say of how many requests a P99 is at least: of a hundred it is little more than the slowest."""
    counts = [v for r in results for key, v in r.figures.items() if key.rpartition(".")[2] == "requests"]
    least = f"A cell's P99 is of {min(counts, default=0):,.0f} requests or more"
    return f"{least}; of a hundred it is about the slowest." if counts else ""


def split_tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield every split of the same workers, a table a figure; the best of each row is marked."""
    data = arranged.done(results)
    default = arranged.default_policy(data)
    own = [result for result in data if result.cell.policy.name == default]
    for cells in arranged.splits(own):
        splits, fleet, content = arranged.split_names(cells), cells[0].cell.fleet, cells[0].cell.content.name
        rows = arranged.grouped(cells, lambda result: result.cell.load.text)
        for figure in SPLIT_FIGURES:
            title = {"e2e_mean_s": "E2E mean (s)", **ABSOLUTE}[figure]
            yield Table(
                title=f"Every split of {fleet.prefill + fleet.decode} workers, {content}: {title}",
                columns=("load", *splits),
                rows=tuple(
                    (Text(load), *_split_row(members, figure, splits)) for load, members in rows.items()
                ),
                note=f"{default}; medians over seeds; ★ the best median of the row, be it by noise.",
                leading=False,
            )


def _split_row(results: Sequence[Result], figure: str, splits: Sequence[str]) -> tuple[Text, ...]:
    by_split = arranged.grouped(results, lambda result: result.cell.fleet.topology)
    found = {split: typical(by_split.get(split, ()), figure) for split in splits}
    medians = {split: interval.median for split, interval in found.items() if interval is not None}
    shown = {split: value_text(median, figure) for split, median in medians.items()}
    best = arranged.best(medians, shown, higher=figure == "throughput_rps")
    return tuple(
        Text("★ " * (split in best) + shown[split]) if split in shown else Text(UNKNOWN) for split in splits
    )


def problems(results: Sequence[Result]) -> Table | None:
    """Return the void and failed cells with their reasons; None when there are none."""
    rows = [
        (
            Text(result.state),
            Text(result.cell.policy.name),
            Text(result.cell.group),
            *_seed_and_reason(result),
        )
        for result in results
        if result.state != "done"
    ]
    if not rows:
        return None
    return Table(
        title="Void and failed cells",
        columns=("state", "policy", "fleet | workload | load", "seed", "reason"),
        rows=tuple(rows),
        note="Void: this machine's processors were what limited, or the client was late, so the figures say "
        "nothing of routing. Failed: there are none. Neither is in any other table, nor in a plot.",
    )


def failures(results: Sequence[Result]) -> Table | None:
    """Return how many requests failed by policy and group, where any did; None where none did."""
    by = arranged.grouped(arranged.done(results), lambda result: (result.cell.policy.name, result.cell.group))
    counts = {key: (_summed(cells, "failed"), _summed(cells, "requests")) for key, cells in by.items()}
    rows = tuple(
        (Text(policy), Text(group), Text(f"{failed:,.0f}"), Text(f"{answered:,.0f}"))
        for (policy, group), (failed, answered) in counts.items()
        if failed
    )
    if not rows:
        return None
    return Table(
        title="Failed requests",
        columns=("policy", "fleet | workload | load", "failed", "answered"),
        rows=rows,
        note="Over all seeds. A request that failed is in no latency, so a policy that fails the slow ones "
        "looks fast: compare it with care.",
    )


def _summed(results: Sequence[Result], figure: str) -> float:
    """Return a count over all seeds and phases."""
    return sum(value for r in results for key, value in r.figures.items() if key.rpartition(".")[2] == figure)


def _seed_and_reason(result: Result) -> tuple[Text, Text]:
    """Return them; what a graph's processes said last is in the file of results, not in a table."""
    reason = result.reason.partition(LAST_LINES)[0]
    if len(reason) > REASON_CHARS:
        reason = reason[:REASON_CHARS] + " ..."
    return Text(str(result.cell.seed)), Text(reason or "no reason given")


def seeds_of(stamp: Stamp, results: Sequence[Result]) -> tuple[int, ...]:
    """Return the seeds that there are results of; of no result, those that were asked for."""
    return tuple(sorted({result.cell.seed for result in results})) or stamp.seeds


def stamp_table(stamp: Stamp) -> Table:
    """Return what was measured with what, where."""
    machine = stamp.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    facts = {
        "suite": stamp.suite,
        "command": stamp.command,
        "started": stamp.started_at,
        "seeds": ", ".join(map(str, stamp.seeds)),
        "cells": str(stamp.cells),
        "commit": machine.commit or "none: not a checkout",
        "packages": packages,
        "Python": machine.python,
        "nats-server": machine.nats_server or UNKNOWN,
        "machine": f"{machine.processor}, {machine.cores} cores, {machine.system}",
    }
    return Table(
        title="Build stamp",
        columns=("what", "value"),
        rows=tuple((Text(name), Text(value)) for name, value in facts.items()),
    )


def fleets(results: Sequence[Result]) -> Table:
    """Return what each fleet's workers were: names leave most of it out, and figures are of it all."""
    found = sorted({result.cell.fleet for result in results}, key=lambda fleet: fleet.name)
    note = "Workers are Dynamo's mock engine. Speed: the engine's over that of the GPU it simulates."
    if any(result.cell.suite.startswith("paper-") for result in results):
        note += " The batch was chosen so that these fleets saturate within the paper's range of users."
    return Table(
        title="Fleets",
        columns=(
            "fleet",
            "workers",
            "timing",
            "batch",
            "KV cache",
            "host tier",
            "routers",
            "unlike the others",
        ),
        rows=tuple(tuple(map(Text, (fleet.name, fleet.topology, *_worker(fleet)))) for fleet in found),
        note=note,
    )


def _worker(fleet: Fleet) -> tuple[str, ...]:
    odd = [f"{one.role}-{one.number} {one.factor:g}x slower" for one in fleet.slow]
    if stall := fleet.stall:
        odd.append(f"{stall.role}-{stall.number} stalls {stall.stall_s:g} s in {stall.period_s:g}")
    timing = fleet.profile or "the engine's own"
    at_once = f", of prompts {fleet.prefill_at_once}" if fleet.prefill_at_once else ""
    return (
        f"{timing}, speed {fleet.speedup:g}",
        f"{fleet.max_num_batched_tokens:,} tokens, {fleet.max_num_seqs:,} requests{at_once}",
        f"{fleet.kv_blocks:,} blocks of {fleet.block_tokens} tokens",
        f"{fleet.host_blocks:,} blocks" if fleet.host_blocks else UNKNOWN,
        f"{fleet.routers}" + " synchronised" * fleet.replica_sync,
        ", ".join(odd) or UNKNOWN,
    )


def counted(stamp: Stamp, results: Sequence[Result]) -> str:
    """Say how many cells there are of each state, and how many are still to be run."""
    states = Counter(result.state for result in results)
    cells = max(stamp.cells, len(results))  # the last command may have asked for some of them alone
    parts = [f"{states['done']} of {cells} cells done"]
    parts += [f"{states[state]} {state}" for state in ("void", "failed") if states[state]]
    missing = cells - len(results)
    return ", ".join(parts) + (f", {missing} not run yet" if missing > 0 else "")
