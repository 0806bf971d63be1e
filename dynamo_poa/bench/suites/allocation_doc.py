"""`python -m dynamo_poa.bench.suites.allocation_doc DIR --out FILE`: predicted splits beside simulated ones.

Owns: the document's tables, when a prediction counts as right, what is said of those that are not.
Does not own: predictions and what they are made from (allocation.py), the simulated figures (figures.py),
              what is said beside them (allocation_words.py).
Invariant: generated, never edited; misses stand first. Nothing is predicted from requests it is judged on.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dynamo_poa.advice import worth_it
from dynamo_poa.bench.suites import allocation
from dynamo_poa.bench.suites.allocation_words import AS_READ, DEVELOPED, explained
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.store import Contents, read
from dynamo_poa.bench.suites.summary import of_table
from dynamo_poa.bench.suites.tables import Table, Text
from dynamo_poa.bench.suites.written import write
from dynamo_poa.coupling import AllocationEstimate, Attainment, Split
from dynamo_poa.errors import ConfigError
from dynamo_poa.games.allocation import best_split, equilibrium
from dynamo_poa.prompts import REQUESTS, UNCACHED

AS_GOOD_FRAC = 0.03  # of the simulated best's goodput: a predicted best that gives up no more is right
OFF_FRAC = 0.25  # of a goodput: more is told
WANTED = 8  # of ten workloads [issue 7]
MIDDLE = allocation.MIDDLE.name
FIGURES = ("goodput_rps", "ttft_frac", "itl_frac")


class Simulated(NamedTuple):
    """One split under a workload, means over the seeds."""

    goodput_rps: float
    ttft_frac: float
    itl_frac: float


class Row(NamedTuple):
    """A workload: what was predicted and what was simulated of each split, fewest prefill workers first.

    read:  what the controller's own code makes of a minute of it, at MIDDLE
    """

    name: str
    held_out: bool
    predicted: tuple[Attainment, ...]
    simulated: tuple[Simulated, ...]
    at: dict[str, tuple[Attainment, ...]]
    read: AllocationEstimate

    @property
    def best_rps(self) -> float:
        """Return the most goodput that any split has in simulation."""
        return max(one.goodput_rps for one in self.simulated)

    def lost_frac(self, every: Sequence[Attainment]) -> float:
        """Return what the split predicted as best gives up in simulation, of the best's goodput."""
        return self.lost_at(best_split(every).split)

    def lost_at(self, split: Split) -> float:
        """Return what a split gives up in simulation, of the best's goodput."""
        chosen = self.simulated[split.prefill - 1].goodput_rps
        return 1 - chosen / self.best_rps if self.best_rps > 0 else 0.0

    @property
    def right(self) -> bool:
        """Tell whether the split predicted from the middle one is the best, or nearly."""
        return self.lost_frac(self.predicted) <= AS_GOOD_FRAC

    @property
    def read_split(self) -> Split | None:
        """Return the split that the controller would have, None where it cannot tell."""
        kept = self.read.target or self.read.now
        return None if kept is None or self.read.poa_hat is None else kept.split

    @property
    def read_right(self) -> bool:
        """Tell whether that one is the best, or nearly."""
        return self.read_split is not None and self.lost_at(self.read_split) <= AS_GOOD_FRAC

    @property
    def read_gain_rps(self) -> float:
        """Return what that one gains in simulation on MIDDLE's goodput."""
        middle = self.simulated[allocation.MIDDLE.prefill - 1].goodput_rps
        return (
            0.0
            if self.read_split is None
            else self.simulated[self.read_split.prefill - 1].goodput_rps - middle
        )

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
            read_so = allocation.as_read(known[name])
            rows.append(Row(name, name in held_out, at[MIDDLE], simulated, at, read_so))
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
    parts += [
        of_table(_verdicts(rows), 2),
        "## What was missed, and why",
        *_missed(rows),
        *_misread(rows),
        *_off(rows),
    ]
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
        "defaults, and predicted by the allocation game from what was measured at one split "
        f"({MIDDLE} unless said), the mix and the curves of LatencyBook, on requests of another seed, of a "
        "trace on its other half. Goodput is requests a second within both objectives, of the last "
        f"three quarters of the requests. The objectives are {allocation.UNLOADED_TIMES:g} times what a "
        "request takes on an unloaded fleet, on average, set before anything was predicted. Prefill workers "
        "take one prompt at a time: with more, the simulator's prefill workers hand a prompt over only when "
        "they have generated its whole answer or run out of prompts, which engines do not do."
        f"{absent}\n\n{AS_READ}\n\n{DEVELOPED}"
    )


def _names(contents: Contents) -> set[str]:
    return {result.cell.content.name for result in contents.results}


def _short(rows: Sequence[Row]) -> str:
    groups = ([row for row in rows if not row.held_out], [row for row in rows if row.held_out])
    counts = [f"**{sum(row.right for row in group)} of {len(group)}**" for group in groups]
    read_so = [f"**{sum(row.read_right for row in group)} of {len(group)}**" for group in groups]
    off = [
        abs(getattr(predicted, figure) - getattr(simulated, figure))
        for row in rows
        for predicted, simulated in zip(row.predicted, row.simulated, strict=True)
        for figure in FIGURES[1:]
    ]
    exact = sum(str(best_split(row.predicted).split) == row.simulated_best for row in rows)
    ends = sum(row.lost_frac(row.at[row.followed()[-1]]) <= AS_GOOD_FRAC for row in rows)
    advised = [row for row in rows if worth_it(row.read) is not None]
    better = sum(row.read_gain_rps > 0 for row in advised)
    return (
        f"**With the demand known** the predicted best split is simulation's, or within {AS_GOOD_FRAC:.0%} "
        f"of its goodput, in {counts[0]} workloads that the model was made on, and in {counts[1]} that were "
        f"held out; the very same in {exact} of all {len(rows)}. This says what the model is worth, and the "
        f"{WANTED} of 10 that were wanted are claimed for this: a prediction beside simulation, from a "
        "demand that is known, on this fleet. An attainment, TTFT or ITL of one split, is predicted with a "
        f"median error of {statistics.median(off):.3f}, mean {statistics.fmean(off):.3f}. Where the "
        "prediction is followed and measured again at each split that it leads to, it ends at such a split "
        f"in {ends} of {len(rows)}.\n\n"
        f"**As the controller reads it** from a minute, the split that it would have is as good in "
        f"{read_so[0]} of the same workloads and in {read_so[1]} of those held out, from the model and "
        f"not from this reading. It would advise a change, if that held for a minute, in {len(advised)}, and "
        f"the change raises goodput in simulation in {better} of them. This says what the controller is "
        "worth, on this simulator."
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
            "as the controller reads it",
            "equilibrium",
            "given up in equilibrium",
            "advice followed",
        ),
        rows=tuple(
            _verdict(row) for row in sorted(rows, key=lambda row: (row.right, row.read_right, row.held_out))
        ),
        note="Predicted, in equilibrium and followed: with the demand known. As the controller reads it: the "
        "split it would have, what that gives up, and whether the gain is beyond noise, so that it is "
        "advised. In equilibrium: where a worker more would gain either pool as much attainment. Advice "
        "followed: each split predicted from what was measured at the one before.",
    )


def _verdict(row: Row) -> tuple[Text, ...]:
    settled = equilibrium(row.predicted).split
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
                _read_so(row),
                str(settled),
                f"{row.lost_at(settled):.1%}",
                " → ".join(row.followed()),
            ),
        )
    )


def _read_so(row: Row) -> str:
    if row.read_split is None:
        return f"**none**: {row.read.reason}"
    told = f"{row.read_split} ({row.lost_at(row.read_split):.1%})"
    return (told if row.read_right else f"**{told}**") + " advised" * (worth_it(row.read) is not None)


def _missed(rows: Sequence[Row]) -> Iterator[str]:
    """Yield for each miss which attainment was wrong where, and what measuring elsewhere makes of it."""
    missed = [row for row in rows if not row.right]
    if not missed:
        yield "With the demand known, nothing."
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
            f"{adds_us[best]:.0f} us by the one measured at {best}. {_why(row.name)}".rstrip()
        )


def _misread(rows: Sequence[Row]) -> Iterator[str]:
    """Yield where the controller's reading has another split than the best, though the model has not."""
    for row in rows:
        if row.right and not row.read_right:
            known = allocation.inputs().workloads[row.name]
            mix, minute = known.at[MIDDLE].mix, known.minute
            sums = np.array(minute.seconds).sum(axis=0)
            rate = "a closed loop" if mix.users else f"{mix.arrival_rps:.3g} requests/s"
            yield (
                f"**{row.name}**, as the controller reads it: {row.read_split or row.read.reason}. It reads "
                f"{sums[REQUESTS] / len(minute.seconds):.3g} requests/s, "
                f"{sums[UNCACHED] / sums[REQUESTS]:.0f} uncached tokens, {minute.context_tokens:.0f} held "
                f"and {minute.output_tokens:.0f} of an answer, means, in its minute; in the run that the "
                f"prediction is made from there are {rate}, {mix.uncached_tokens:.0f}, "
                f"{mix.context_tokens:.0f} and {mix.output_tokens:.0f}.{_close(row)}"
            )


def _close(row: Row) -> str:
    """Return what the two splits were predicted to give with the demand known."""
    if row.read_split is None:
        return ""
    chosen, best = row.predicted[row.read_split.prefill - 1], best_split(row.predicted)
    return (
        f" With the demand known {best.split} is predicted to give {best.goodput_rps:.1f} requests/s and "
        f"{chosen.split} {chosen.goodput_rps:.1f}."
    )


def _why(name: str) -> str:
    return explained(name, allocation.inputs().workloads[name])


def _off(rows: Sequence[Row]) -> Iterator[str]:
    """Yield where the split is right and what it was predicted to get done is not."""
    for row in rows:
        predicted = best_split(row.predicted)
        simulated = row.simulated[predicted.split.prefill - 1].goodput_rps
        if row.right and abs(predicted.goodput_rps - simulated) > OFF_FRAC * simulated:
            yield (
                f"**{row.name}**: the split is right and its goodput is not, {predicted.goodput_rps:.3g} "
                f"requests/s predicted and {simulated:.3g} simulated. {_why(row.name)}".rstrip()
            )


def _adds_us(name: str, measured_at: str) -> float:
    """Return what a request adds to an iteration, by the curve measured at one split."""
    measured = allocation.inputs().workloads[name].at[measured_at]
    per_token_s = measured.decode.decode_kv_token_s
    return (measured.decode.decode_request_s + per_token_s * measured.mix.context_tokens) * 1e6


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
    file = arguments.folder / f"{allocation.SUITE}.jsonl"
    return write(arguments.out, lambda: markdown(read(file)))


if __name__ == "__main__":
    sys.exit(main())
