"""Which fleets `hetero` compares policies on, under what load and for how long.

Owns: the fleet variants and their names, who is compared on each, how long graphs learn before they are
      measured.
Does not own: policies (baselines.py), the other suites (catalogue.py), graphs (live_graphs.py).
Invariant: policies that are to be left on stand beside Dynamo's default in every variant; of `auto`, routers
           that are synchronised are left out.
           With three seeds all of it stays within 40 minutes, and the policies that are judged within 32.
Source: issues 5 and 6. Speeds: measured on two cores, so that the simulated GPUs and not the processors are
        the limit. Loads under which a setting is known to matter: replayed, 3 seeds, as said beside them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dynamo_poa.bench.suites import baselines
from dynamo_poa.bench.suites.cells import Cell, Fleet, SlowWorker, Stall
from dynamo_poa.workloads.arrivals import Closed
from dynamo_poa.workloads.synthetic import Content, Zipf

# Fleets of `hetero` that something is asked of by name (earned.py).
SLOW_AGGREGATED = "one of five aggregated workers 5x slower"
SLOW_DECODE = "one of five decode workers 5x slower"
WITHOUT_SLOW = "the other four decode workers alone"
STALLING = "one decode worker stalls 2 s in 6"
PREFILL_BOUND, DECODE_BOUND = "prefill-bound", "decode-bound"
FOUR_ROUTERS = "4 routers"

# 32 users on workers at half speed: some 50 requests/s, under which two cores are half busy.
LIVE_FLEET = Fleet(name="equal", prefill=2, decode=4, speedup=0.5, kv_blocks=4096)
LIVE_CONTENT = Zipf(output_tokens=32)


def live_fleet(name: str, **changed: Any) -> Fleet:
    """Return the usual live fleet under another name, with what is changed of it."""
    return msgspec.structs.replace(LIVE_FLEET, name=name, **changed)


def _slow(role: Literal["aggregated", "decode"], factor: float) -> tuple[SlowWorker, ...]:
    return (SlowWorker(role=role, number=0, factor=factor),)


@dataclass(frozen=True)
class _Place:
    """Fleets under one workload, with what is asked of whom there and for how long.

    policies:  by name, empty for all
    """

    fleets: tuple[Fleet, ...]
    content: Content
    users: int
    policies: tuple[str, ...]
    learn_s: float = 0.0
    warm_up_s: float = 2.0
    seconds: float = 4.0

    def cells(self, suite: str, seeds: Iterable[int]) -> Iterator[Cell]:
        """Yield its cells: every policy on every fleet with every seed."""
        policies = tuple(map(baselines.policy, self.policies)) or baselines.LIVE
        for fleet in self.fleets:
            for seed in seeds:
                for policy in policies:
                    yield Cell(
                        suite=suite,
                        engine="live",
                        fleet=fleet,
                        content=self.content,
                        load=Closed(users=self.users),
                        policy=policy,
                        seed=seed,
                        learn_s=self.learn_s,
                        warm_up_s=self.warm_up_s,
                        seconds=self.seconds,
                    )


# Slower still where a worker is slow: at 48 users decoding, not the processors, is then what limits. With a
# worker at a fifth of that its requests last 6 s, which is what has to pass before a loop is in its stride.
_SLOWED: dict[str, Any] = {"speedup": 0.25, "kv_blocks": 4096}
_IN_ITS_STRIDE = {"learn_s": 4.0, "warm_up_s": 4.0, "seconds": 6.0}
_SHORT = Zipf(input_tokens=128, output_tokens=32)
_SHORT_IN = Zipf(
    input_tokens=128, output_tokens=64
)  # with half of that two prefill workers limit, not decoding
# Replayed: here a prefill load scale of 4 has mean TTFT 12 % lower, and τ = 0.7 has it 16 % higher.
_PREFILL_BOUND = Fleet(name=PREFILL_BOUND, prefill=0, decode=6, speedup=0.5, kv_blocks=4096)
_LONG = Zipf(prefixes=50, input_tokens=4096, output_tokens=16)
# Replayed: here τ = 0.7 has mean TTFT 23 % lower: the default keeps short prompts where their prefix is.
_DECODE_BOUND = Zipf(input_tokens=256, output_tokens=128)
_ROUTERS = {
    (count, sync): msgspec.structs.replace(
        _PREFILL_BOUND, name=f"{count} routers{' synchronised' * sync}", routers=count, replica_sync=sync
    )
    for count in (2, 4)
    for sync in (False, True)
}
_HETERO = (
    _Place((LIVE_FLEET,), LIVE_CONTENT, 32, ()),
    _Place(
        (
            live_fleet("one decode worker 3x slower", slow=_slow("decode", 3.0)),
            live_fleet("small KV caches", kv_blocks=640),
            live_fleet("small KV caches with a host tier", kv_blocks=640, host_blocks=4096),
        ),
        LIVE_CONTENT,
        32,
        ("kv", "ours auto", "ours marginal"),
    ),
    _Place(
        (Fleet(name=SLOW_AGGREGATED, prefill=0, decode=5, slow=_slow("aggregated", 5.0), **_SLOWED),),
        _SHORT,
        48,
        ("least-loaded", "kv best", *baselines.JUDGED),
        **_IN_ITS_STRIDE,
    ),
    _Place(
        (Fleet(name=SLOW_DECODE, prefill=2, decode=5, slow=_slow("decode", 5.0), **_SLOWED),),
        _SHORT_IN,
        48,
        baselines.JUDGED,
        **_IN_ITS_STRIDE | {"learn_s": 12.0},  # what the slow worker was sent before takes it 9 s
    ),
    # What is left without the slow worker: whoever leaves it alone cannot do better than that.
    _Place(
        (Fleet(name=WITHOUT_SLOW, prefill=2, decode=4, **_SLOWED),),
        _SHORT_IN,
        48,
        ("kv",),
        **_IN_ITS_STRIDE,
    ),
    # Two whole periods are measured, wherever in one that begins; who learns of stalls has seen some by then.
    _Place(
        (live_fleet(STALLING, stall=Stall(role="decode", number=0, stall_s=2.0, period_s=6.0)),),
        LIVE_CONTENT,
        32,
        baselines.JUDGED,
        learn_s=14.0,
        seconds=12.0,
    ),
    # A change that `auto` tries takes it half a minute at least to keep.
    _Place((_PREFILL_BOUND,), _LONG, 48, ("kv best", *baselines.JUDGED), learn_s=30.0, seconds=6.0),
    _Place(
        (live_fleet(DECODE_BOUND),),
        _DECODE_BOUND,
        40,
        ("kv best", *baselines.JUDGED),
        learn_s=30.0,
        seconds=6.0,
    ),
    # Where several routers differ from one: those that keep account of what they sent.
    _Place((_ROUTERS[4, False],), _LONG, 48, baselines.JUDGED, seconds=6.0),
    _Place((_ROUTERS[2, False],), _LONG, 48, ("kv", "ours auto", "ours marginal")),
    _Place((_ROUTERS[2, True], _ROUTERS[4, True]), _LONG, 48, ("kv", "ours marginal")),
)


def cells(suite: str, seeds: Iterable[int]) -> Iterator[Cell]:
    """Yield the suite's cells."""
    for place in _HETERO:
        yield from place.cells(suite, seeds)
