"""How long it takes to price every split of a fleet.

Owns: the fleets and loads timed, the figure.
Does not own: the game (games/allocation.py).
Invariant: what is timed is what the controller asks for: every split at once, curves and mix as measured.
Source: goals: all splits of 64 workers in 50 ms on one core.
"""

import statistics
import time
from collections.abc import Callable

from dynamo_poa.bench.report import Figure, Measure, at_most, plain
from dynamo_poa.bench.story import quantile
from dynamo_poa.config import SloConfig
from dynamo_poa.games.allocation import Mix, Pool, PoolLimits, Pools, best_split, every_split
from dynamo_poa.values import Curve

WORKERS = 64
GOAL_MS = 50.0
CURVE = Curve(
    prefill_base_s=0.016,
    prefill_token_s=1.7e-5,
    decode_base_s=0.006,
    decode_request_s=2e-5,
    decode_kv_token_s=1.6e-7,
)
SLO = SloConfig(ttft_s=0.2, itl_s=0.015)
# Requests/s of an open loop; 4,000 are more than any split gets done, so that queues are long.
RATES_RPS = {"light": 100.0, "heavy": 800.0, "over capacity": 4000.0}
USERS, THINK_S = 2000, 2.0


def measure(rounds: int, say: Callable[[str], None]) -> Figure:
    """Time every split of the fleet under each load, so many times."""
    spent_ms = {name: _times_ms(mix, rounds) for name, mix in loads().items()}
    for name, times_ms in spent_ms.items():
        say(f"{name}: {statistics.median(times_ms):.0f} ms")
    return figure(spent_ms)


def figure(spent_ms: dict[str, list[float]]) -> Figure:
    """Turn times by load into the figure."""
    measures: list[Measure] = []
    for name, times_ms in spent_ms.items():
        key = name.replace(" ", "_")
        measures += [
            at_most(f"{key}_ms", f"{name}: median", statistics.median(times_ms), "ms", GOAL_MS),
            plain(f"{key}_p99_ms", f"{name}: P99", quantile(times_ms, 0.99), "ms"),
        ]
    return Figure(
        name="splits",
        title=f"Pricing every split of {WORKERS} workers",
        measures=tuple(measures),
        conditions=(
            f"open loop of {', '.join(f'{rate:g} requests/s ({name})' for name, rate in RATES_RPS.items())}; "
            f"closed loop of {USERS} users who think {THINK_S:g} s",
            "prompts of 1,000 tokens to be computed, with half of the variance of an exponential, answers of "
            "100 tokens; the best split is looked for in the same time",
        ),
    )


def loads() -> dict[str, Mix]:
    """Return what is asked, by name."""
    found = {name: _mix(arrival_rps=rate_rps) for name, rate_rps in RATES_RPS.items()}
    return found | {"closed": _mix(users=USERS, think_s=THINK_S)}


def _mix(arrival_rps: float = 0.0, users: int = 0, think_s: float = 0.0) -> Mix:
    return Mix(
        uncached_tokens=1000.0,
        uncached_squared=1.5e6,
        context_tokens=1200.0,
        context_squared=2e6,
        output_tokens=100.0,
        arrival_rps=arrival_rps,
        users=users,
        think_s=think_s,
    )


def _times_ms(mix: Mix, rounds: int) -> list[float]:
    limits = PoolLimits(max_num_seqs=256, kv_tokens=262_144)
    pools = Pools(prefill=Pool(curve=CURVE, limits=limits), decode=Pool(curve=CURVE, limits=limits))
    times_ms = []
    for number in range(-1, rounds):
        before_s = time.perf_counter()
        best_split(every_split(mix, pools, SLO, WORKERS))
        if number >= 0:
            times_ms.append((time.perf_counter() - before_s) * 1000)
    return times_ms
