"""`python -m dynamo_poa.bench.suites.allocation_doc DIR --out FILE`: predicted splits beside simulated ones.

Owns: the document's tables, when a prediction counts as right, what is said of those that are not.
Does not own: predictions and what they are made from (allocation.py), the simulated figures (figures.py).
Invariant: generated, never edited; misses stand first. Nothing is predicted from requests it is judged on.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo_poa.bench.suites import allocation
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.store import Contents, read
from dynamo_poa.bench.suites.summary import of_table
from dynamo_poa.bench.suites.tables import Table, Text
from dynamo_poa.coupling import Attainment
from dynamo_poa.errors import ConfigError, PoaError
from dynamo_poa.games.allocation import best_split, equilibrium

AS_GOOD_FRAC = 0.03  # of the simulated best's goodput: a predicted best that gives up no more is right
OFF_FRAC = 0.25  # of a goodput: more is told
WANTED = 8  # of ten workloads [issue 7]
MIDDLE = allocation.FLEETS[len(allocation.FLEETS) // 2].name
FIGURES = ("goodput_rps", "ttft_frac", "itl_frac")


class Simulated(NamedTuple):
    """One split under a workload, means over the seeds."""

    goodput_rps: float
    ttft_frac: float
    itl_frac: float


class Row(NamedTuple):
    """A workload: what was predicted and what was simulated of each split, fewest prefill workers first."""

    name: str
    held_out: bool
    predicted: tuple[Attainment, ...]
    simulated: tuple[Simulated, ...]
    at: dict[str, tuple[Attainment, ...]]

    @property
    def best_rps(self) -> float:
        """Return the most goodput that any split has in simulation."""
        return max(one.goodput_rps for one in self.simulated)

    def lost_frac(self, every: Sequence[Attainment]) -> float:
        """Return what the split predicted as best gives up in simulation, of the best's goodput."""
        chosen = self.simulated[best_split(every).split.prefill - 1].goodput_rps
        return 1 - chosen / self.best_rps if self.best_rps > 0 else 0.0

    @property
    def right(self) -> bool:
        """Tell whether the split predicted from the middle one is the best, or nearly."""
        return self.lost_frac(self.predicted) <= AS_GOOD_FRAC

    @property
    def simulated_best(self) -> str:
        """Return the split with the most goodput in simulation."""
        return allocation.FLEETS[[one.goodput_rps for one in self.simulated].index(self.best_rps)].name

    def followed(self) -> tuple[str, ...]:
        """Return the splits that predictions lead through, each made from what was measured at the last."""
        path = [MIDDLE]
        while (then := str(best_split(self.at[path[-1]]).split)) not in path:
            path.append(then)
        return tuple(path)


def rows_of(results: Sequence[Result]) -> tuple[Row, ...]:
    """Return the workloads of which every split was simulated, in the suite's order.

    Raises:  ConfigError when there are none.
    """
    known = allocation.inputs().workloads
    found: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        if result.state == "done":
            cell = result.cell
            asked = allocation.Asked(content=cell.content, load=cell.load, requests=cell.requests)
            found.setdefault(asked.name, {}).setdefault(cell.fleet.name, []).append(result)
    names = [fleet.name for fleet in allocation.FLEETS]
    held_out = {asked.name for asked in allocation.workloads(None) if asked.held_out}
    rows = []
    for name, by_fleet in found.items():
        if name in known and all(fleet in by_fleet for fleet in names):
            at = {fleet: allocation.predicted(known[name], fleet) for fleet in names}
            simulated = tuple(_mean(by_fleet[fleet]) for fleet in names)
            rows.append(Row(name, name in held_out, at[MIDDLE], simulated, at))
    if not rows:
        raise ConfigError([f"suite {allocation.SUITE!r}: no workload has results of every split"])
    return tuple(rows)


def _mean(results: Sequence[Result]) -> Simulated:
    return Simulated(*(statistics.fmean(result.figures[figure] for result in results) for figure in FIGURES))


def markdown(contents: Contents) -> str:
    """Return the document."""
    rows = rows_of(contents.results)
    parts = [
        "# Whether the predicted split is the best one",
        _preamble(contents),
        "## In short",
        _short(rows),
    ]
    parts += [of_table(_verdicts(rows), 2), "## What was missed, and why", *_missed(rows), *_off(rows)]
    parts += [of_table(_every(rows), 2), of_table(_from_each(rows), 2), _measured_with(contents)]
    return "\n\n".join(parts) + "\n"


def _preamble(contents: Contents) -> str:
    traces = [
        file for file in allocation.TRACES if not any(Path(file).stem in name for name in _names(contents))
    ]
    absent = f" Not given, so left out: {', '.join(traces)}." if traces else ""
    return (
        "Generated from results by `python -m dynamo_poa.bench.suites.allocation_doc DIR --out "
        "docs/results-allocation.md`; not edited by hand. Every split of 8 workers was run on Dynamo's "
        f"simulator under each workload with {len(contents.stamp.seeds)} seeds, by KV routing at its "
        "defaults, and predicted by the allocation game from what a controller would have measured at one "
        f"split ({MIDDLE} unless said): its mix and the curves of LatencyBook, on requests of another seed, "
        "of a trace on its other half. Goodput is requests a second within both objectives, of the last "
        f"three quarters of the requests. The objectives are {allocation.UNLOADED_TIMES:g} times what a "
        "request takes on an unloaded fleet, on average, set before anything was predicted. Prefill workers "
        "take one prompt at a time: with more, the simulator's prefill workers hand a prompt over only when "
        "they have generated its whole answer or run out of prompts, which engines do not do."
        f"{absent}\n\n{DEVELOPED}"
    )


def _names(contents: Contents) -> set[str]:
    return {result.cell.content.name for result in contents.results}


def _short(rows: Sequence[Row]) -> str:
    groups = ([row for row in rows if not row.held_out], [row for row in rows if row.held_out])
    counts = [f"**{sum(row.right for row in group)} of {len(group)}**" for group in groups]
    off = [
        abs(getattr(predicted, figure) - getattr(simulated, figure))
        for row in rows
        for predicted, simulated in zip(row.predicted, row.simulated, strict=True)
        for figure in FIGURES[1:]
    ]
    exact = sum(str(best_split(row.predicted).split) == row.simulated_best for row in rows)
    ends = sum(row.lost_frac(row.at[row.followed()[-1]]) <= AS_GOOD_FRAC for row in rows)
    return (
        f"The predicted best split is simulation's, or within {AS_GOOD_FRAC:.0%} of its goodput, in "
        f"{counts[0]} workloads (wanted: {WANTED} of 10), and in {counts[1]} others that were held out; the "
        f"very same in {exact} of all {len(rows)}. An attainment, TTFT or ITL of one split, is predicted "
        f"with a median error of {statistics.median(off):.3f}, mean {statistics.fmean(off):.3f}. Where the "
        "advice is followed and measured again at each split that it leads to, it ends at such a split in "
        f"{ends} of {len(rows)}."
    )


def _verdicts(rows: Sequence[Row]) -> Table:
    return Table(
        title="Workloads",
        columns=(
            "workload",
            "predicted best",
            "simulated best",
            "its goodput (requests/s)",
            "given up by the prediction",
            "verdict",
            "equilibrium",
            "given up in equilibrium",
            "advice followed",
        ),
        rows=tuple(_verdict(row) for row in sorted(rows, key=lambda row: (row.right, row.held_out))),
        note="In equilibrium: where a worker more would gain either pool as much attainment. Advice "
        "followed: each split predicted from what was measured at the one before.",
    )


def _verdict(row: Row) -> tuple[Text, ...]:
    settled = equilibrium(row.predicted).split
    gone = 1 - row.simulated[settled.prefill - 1].goodput_rps / row.best_rps if row.best_rps else 0.0
    return tuple(
        map(
            Text,
            (
                row.name + " (held out)" * row.held_out,
                str(best_split(row.predicted).split),
                row.simulated_best,
                f"{row.best_rps:.3g}",
                f"{row.lost_frac(row.predicted):.1%}",
                "right" if row.right else "**missed**",
                str(settled),
                f"{gone:.1%}",
                " → ".join(row.followed()),
            ),
        )
    )


def _missed(rows: Sequence[Row]) -> Iterator[str]:
    """Yield for each miss which attainment was wrong where, and what measuring elsewhere makes of it."""
    missed = [row for row in rows if not row.right]
    if not missed:
        yield "Nothing."
    for row in missed:
        chosen, best = best_split(row.predicted).split, row.simulated_best
        at = [fleet.name for fleet in allocation.FLEETS].index(best)
        predicted, simulated = row.predicted[at], row.simulated[at]
        found = [fleet for fleet, every in row.at.items() if row.lost_frac(every) <= AS_GOOD_FRAC]
        adds_us = {fleet: _adds_us(row.name, fleet) for fleet in (MIDDLE, best)}
        yield (
            f"**{row.name}**: {chosen} predicted, {best} is best. There, TTFT attainment was predicted as "
            f"{predicted.ttft_frac:.3f} and is {simulated.ttft_frac:.3f}, ITL attainment as "
            f"{predicted.itl_frac:.3f} and is {simulated.itl_frac:.3f}. By what is measured at "
            f"{', '.join(found) or 'none of the splits'} the prediction is right. A further request adds "
            f"{adds_us[MIDDLE]:.0f} us to an iteration by the curve measured at {MIDDLE} and "
            f"{adds_us[best]:.0f} us by the one measured at {best}. {EXPLAINED.get(row.name, '')}".rstrip()
        )


def _off(rows: Sequence[Row]) -> Iterator[str]:
    """Yield where the split is right and what it was predicted to get done is not."""
    for row in rows:
        predicted = best_split(row.predicted)
        simulated = row.simulated[predicted.split.prefill - 1].goodput_rps
        if row.right and abs(predicted.goodput_rps / simulated - 1) > OFF_FRAC:
            yield (
                f"**{row.name}**: the split is right and its goodput is not, {predicted.goodput_rps:.3g} "
                f"requests/s predicted and {simulated:.3g} simulated. {EXPLAINED.get(row.name, '')}".rstrip()
            )


def _adds_us(name: str, measured_at: str) -> float:
    """Return what a request adds to an iteration, by the curve measured at one split."""
    measured = allocation.inputs().workloads[name].at[measured_at]
    per_token_s = measured.decode.decode_kv_token_s
    return (measured.decode.decode_request_s + per_token_s * measured.mix.context_tokens) * 1e6


EXPLAINED = {
    "zipf | 240 requests/s": "The curve is a straight line and the engine's is not: the simulated engine "
    "counts a block that running requests share once, so that the more run the less each adds, and is "
    "concave in its blocks besides. A line measured at light load is too steep at three times that load. "
    "Following the advice mends it, for the next curve is measured nearer.",
    "mixed | 96 users": "A run ends with few users: those whose last sessions have many turns, and who think "
    "between them. Of 1,500 requests at 4P/4D the last eighth comes at 7.5 a second and those before at 44 "
    "to 72; of 6,000 the last at 18 and those before at 48 to 53. The prediction is of the steady state.",
}
DEVELOPED = (
    "The model was made on ten of these workloads. The others were held out: chosen when it was done, and it "
    "has not been changed since. Its first version, a central queue and curves measured on prompts that "
    "share nothing, was right in 8 of the ten. What was added since is physics that the simulator's records "
    "showed, each for a term that was off: a prompt waits for the worker it was sent to, not for the first "
    "that is free; Dynamo's router takes a prompt off its books with its first token, so part of its choices "
    "are blind; what runs when a prompt arrives is more likely a long one; a request joins at the next "
    "iteration; contexts differ, and so does what is held."
)


def _every(rows: Sequence[Row]) -> Table:
    return Table(
        title="Every split",
        columns=("workload", "of", *(fleet.name for fleet in allocation.FLEETS)),
        rows=tuple(
            tuple(map(Text, (row.name if first else "", what, *values)))
            for row in rows
            for first, what, values in _pairs(row)
        ),
        note=f"Goodput in requests/s, in brackets TTFT and ITL attainment. Predicted from {MIDDLE}.",
    )


def _pairs(row: Row) -> Iterator[tuple[bool, str, list[str]]]:
    for first, what, side in ((True, "predicted", row.predicted), (False, "simulated", row.simulated)):
        yield (
            first,
            what,
            [f"{one.goodput_rps:.1f} ({one.ttft_frac:.2f}, {one.itl_frac:.2f})" for one in side],
        )


def _from_each(rows: Sequence[Row]) -> Table:
    return Table(
        title="Predicted best, by the split that was measured",
        columns=("workload", *(fleet.name for fleet in allocation.FLEETS)),
        rows=tuple(
            tuple(
                map(
                    Text,
                    (
                        row.name,
                        *(f"{best_split(e).split} ({row.lost_frac(e):.0%})" for e in row.at.values()),
                    ),
                )
            )
            for row in rows
        ),
        note="In brackets what that split gives up in simulation. A pool that was far over its capacity when "
        "it was measured says little of its speed.",
    )


def _measured_with(contents: Contents) -> str:
    inputs = allocation.inputs()
    packages = ", ".join(f"{name} {version}" for name, version in sorted(inputs.packages.items()))
    return (
        "## Reproduce\n\n"
        f"`{inputs.command}` measures what predictions are made from, "
        f"`dynamo-poa bench run {allocation.SUITE} --out DIR --trace DIR/{allocation.TRACES[0]}` simulates "
        "(without `--trace` the made-up workloads alone), the command above writes this. Measured with "
        f"{packages}."
    )


def main(argv: list[str] | None = None) -> int:
    """Write the document; return the exit status: 2 when there is nothing to write it from."""
    parser = argparse.ArgumentParser(
        prog="dynamo_poa.bench.suites.allocation_doc", description="Write down what the predictions are worth"
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="of `dynamo-poa bench run allocation --out DIR`"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="Markdown file to write")
    arguments = parser.parse_args(argv)
    try:
        text = markdown(read(arguments.folder / f"{allocation.SUITE}.jsonl"))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    except (PoaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
