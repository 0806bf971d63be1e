"""Whether the split that the allocation game predicts is the one that Dynamo's simulator finds best.

Owns: the suite's fleets, its workloads and their objectives; what is predicted for them, with their demand
      known and as a controller reads it.
Does not own: the game (games/allocation.py), what is read of it (split.py), what was measured of a workload
              (allocation_inputs.py), how a cell is run (replayed.py), the document (allocation_doc.py).
Invariant: what a prediction is made from was measured on requests that no cell of the suite asks, and of a
           trace on its first half. Objectives are UNLOADED_TIMES what an unloaded fleet takes, set before.
Source: issue 7. Why a prefill worker takes one prompt at a time: measured on ai-dynamo 1.4.2's simulator, a
        prefill worker that has several keeps all until it has generated every answer beside the prompts that
        keep coming, or has nothing left to do: engines hand a prompt over when it is computed.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from dynamo_poa.bench.suites import baselines
from dynamo_poa.bench.suites.cells import Cell, Fleet
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import AllocationEstimate, Attainment
from dynamo_poa.games.allocation import Mix, Pool, PoolLimits, Pools, every_split
from dynamo_poa.split import price_split, read_game
from dynamo_poa.values import Curve, Role, WorkerCard
from dynamo_poa.workloads.arrivals import Closed, Load, Poisson, TraceTimes
from dynamo_poa.workloads.synthetic import Content, LongTail, Mixed, MultiTurn, Paper, Trace, Zipf

SUITE = "allocation"
WORKERS = 8
UNLOADED_TIMES = 2.5  # the objectives, as often as a request takes when there is no other
TRACE_REQUESTS = 800
TRACES = ("mooncake_conversation_a.jsonl", "mooncake_synthetic.jsonl")
INPUTS = Path(__file__).parent / "allocation_inputs.json"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One workload, and how many of its requests; `held_out`: the model had been made before it was tried."""

    content: Content
    load: Load
    requests: int = 0
    held_out: bool = False

    @property
    def name(self) -> str:
        """Return what it is kept under, wherever its trace lies."""
        content = (
            msgspec.structs.replace(self.content, part="all", limit=0) if self.is_trace else self.content
        )
        return f"{content.name} | {self.load.text}"

    @property
    def is_trace(self) -> bool:
        """Tell whether it needs a file."""
        return isinstance(self.content, Trace)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's demand and the speed of workers, at one split.

    mix:            of its requests; users and their thought are the workload's own, which no controller knows
    residual_frac:  of the curves over the passes they were fitted to, prefill and decode
    """

    mix: Mix
    prefill: Curve
    decode: Curve
    residual_frac: tuple[float, float]


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller reads of a workload at MIDDLE: the minute before an instant of a run of two.

    seconds, in_flight:             as PromptWindow has them
    output_tokens, context_tokens:  as OutputTokens has them, of requests that ended in that minute
    eighths_rps:                    arrivals a second in each eighth of the time of a run as long as the
                                    suite's, and of this one
    """

    seconds: tuple[tuple[float, ...], ...]
    in_flight: tuple[float, ...]
    output_tokens: float
    context_tokens: float
    eighths_rps: tuple[tuple[float, ...], tuple[float, ...]]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a workload: its objectives, itself at each split, by `3P/5D`, and a minute."""

    slo: SloConfig
    at: dict[str, Measured]
    minute: Minute


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The file of what was measured: of each workload, by its name."""

    command: str
    packages: dict[str, str]
    workloads: dict[str, Known]


def fleet(prefill: int, decode: int) -> Fleet:
    """Return a fleet of so many workers."""
    return Fleet(name=f"{prefill}P/{decode}D", prefill=prefill, decode=decode, prefill_at_once=1)


FLEETS = tuple(fleet(prefill, WORKERS - prefill) for prefill in range(1, WORKERS))
MIDDLE = FLEETS[len(FLEETS) // 2]


def workloads(traces: Path | None) -> tuple[Asked, ...]:
    """Return the workloads: those of other suites, loaded for eight workers, and the traces that there are.

    Args:  traces: the folder they lie in.
    """
    made = (
        Asked(content=Paper(), load=Closed(users=32), requests=2000),
        Asked(content=Zipf(input_tokens=4096, output_tokens=32), load=Closed(users=32), requests=1500),
        Asked(content=Zipf(input_tokens=256, output_tokens=256), load=Closed(users=256), requests=1500),
        Asked(content=LongTail(), load=Closed(users=64), requests=1500),
        Asked(content=Zipf(), load=Poisson(rate_rps=240.0), requests=3000),
        Asked(content=LongTail(), load=Poisson(rate_rps=40.0), requests=1500),
        Asked(content=MultiTurn(), load=Poisson(rate_rps=160.0), requests=2000),
        Asked(content=Mixed(), load=Poisson(rate_rps=45.0), requests=1500),
    )
    held_out = (
        Asked(content=Paper(), load=Poisson(rate_rps=200.0), requests=2000, held_out=True),
        Asked(content=Zipf(input_tokens=2048), load=Poisson(rate_rps=90.0), requests=1500, held_out=True),
        Asked(
            content=Zipf(input_tokens=1024, output_tokens=128),
            load=Closed(users=128),
            requests=1500,
            held_out=True,
        ),
        Asked(
            content=LongTail(input_median_tokens=512.0, output_median_tokens=256.0),
            load=Poisson(rate_rps=40.0),
            requests=1500,
            held_out=True,
        ),
        Asked(
            content=MultiTurn(question_tokens=512), load=Poisson(rate_rps=80.0), requests=1500, held_out=True
        ),
        Asked(content=Mixed(), load=Closed(users=96), requests=1500, held_out=True),
    )
    if traces is None:
        return (*made, *held_out)
    found = (
        Asked(
            content=Trace(path=str(traces / file), part="second", limit=TRACE_REQUESTS),
            load=TraceTimes(speedup=speedup, spread_s=3.0),
        )
        for file, speedup in zip(TRACES, (1.0, 2.0), strict=True)
        if (traces / file).is_file()
    )
    return (*made, *found, *held_out)


def cells(suite: str, seeds: Iterable[int], traces: Path | None) -> Iterator[Cell]:
    """Yield every split under every workload with every seed."""
    known = inputs().workloads
    for asked in workloads(traces):
        for seed in seeds:
            for one in FLEETS:
                yield Cell(
                    suite=suite,
                    engine="replay",
                    fleet=one,
                    content=asked.content,
                    load=asked.load,
                    policy=baselines.DEFAULT,
                    seed=seed,
                    requests=asked.requests,
                    slo=known[asked.name].slo,
                )


@functools.cache
def inputs() -> Inputs:
    """Return what was measured."""
    return msgspec.json.decode(INPUTS.read_bytes(), type=Inputs)


def predicted(known: Known, at: str) -> tuple[Attainment, ...]:
    """Return what every split should give by what was measured at one, fewest prefill workers first."""
    measured = known.at[at]
    pools = Pools(
        prefill=Pool(curve=measured.prefill, limits=_limits(prefill=True)),
        decode=Pool(curve=measured.decode, limits=_limits(prefill=False)),
    )
    return every_split(measured.mix, pools, known.slo, WORKERS)


def as_read(known: Known) -> AllocationEstimate:
    """Return what the controller's own code makes of its minute at the middle split."""
    minute, measured = known.minute, known.at[MIDDLE.name]
    roles = [Role.PREFILL] * MIDDLE.prefill + [Role.DECODE] * MIDDLE.decode
    cards = [
        WorkerCard(
            worker_id=number,
            role=role,
            kv_block_size=MIDDLE.block_tokens,
            total_kv_blocks=MIDDLE.kv_blocks,
            max_num_seqs=MIDDLE.prefill_at_once if role is Role.PREFILL else MIDDLE.max_num_seqs,
            max_num_batched_tokens=MIDDLE.max_num_batched_tokens,
        )
        for number, role in enumerate(roles)
    ]
    return price_split(
        read_game(
            cards,
            {Role.PREFILL: measured.prefill, Role.DECODE: measured.decode},
            np.array(minute.seconds),
            minute.output_tokens,
            known.slo,
            context_tokens=minute.context_tokens,
            in_flight=np.array(minute.in_flight),
        )
    )


def _limits(*, prefill: bool) -> PoolLimits:
    one = FLEETS[0]
    return PoolLimits(
        max_num_seqs=one.prefill_at_once if prefill else one.max_num_seqs,
        kv_tokens=one.kv_blocks * one.block_tokens,
        max_num_batched_tokens=one.max_num_batched_tokens,
    )
