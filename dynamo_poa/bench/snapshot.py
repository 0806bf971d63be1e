"""How long the exact optimum of a snapshot takes.

Owns: the instances, timing their optima, the figure.
Does not own: the optimum (games/routing.py); that it is one is what the tests show.
Invariant: instances are drawn anew for each round from a fixed seed: no result is reused, and every run
           prices the same ones.
Source: the goals are the estimator's: a snapshot a second and leg, in a thread beside the tick.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.bench.report import Figure, at_most
from dynamo_poa.games.routing import decode_optimum, prefill_optimum

Floats = NDArray[np.float64]

SIZES = {(256, 16): 10.0, (512, 64): 60.0}  # (requests, workers): goal, ms
KINDS = ("identical", "homogeneous", "straggler", "cache-heavy", "random")
SLOW = 5.0
PREFIX_GROUPS = 12
HELD_FRAC = 0.15  # of the workers hold a group's prefix
PREFILL_S, PREFILL_S_PER_TOKEN = 5e-3, 1e-4
ITERATION_S, ITERATION_S_PER_REQUEST, ITERATION_S_PER_TOKEN = 6e-3, 2.5e-4, 1e-8
MOVE_S_PER_TOKEN = 1e-6  # of a cache that is on another worker


SpentMs = dict[tuple[str, int, int], dict[str, list[float]]]  # (leg, requests, workers) -> kind -> each time


class Instance(NamedTuple):
    """One snapshot of each leg, as `prefill_optimum` and `decode_optimum` take it."""

    prefill: tuple[Floats, Floats]
    decode: tuple[Floats, Floats]


def measure(rounds: int, say: Callable[[str], None]) -> Figure:
    """Price so many snapshots of each size, kind and leg."""
    prefill_optimum(*instance("random", 8, 2, 0).prefill)  # the first call pays for imports
    spent_ms: SpentMs = {}
    for requests, workers in SIZES:
        for kind in KINDS:
            for seed in range(rounds):
                drawn = instance(kind, requests, workers, seed)
                legs = (("prefill", prefill_optimum, drawn.prefill), ("decode", decode_optimum, drawn.decode))
                for leg, optimum, game in legs:
                    before_s = time.thread_time()
                    optimum(*game)
                    spent = (time.thread_time() - before_s) * 1e3
                    spent_ms.setdefault((leg, requests, workers), {}).setdefault(kind, []).append(spent)
        say(f"{requests} requests, {workers} workers priced")
    return figure(spent_ms)


def figure(spent_ms: SpentMs) -> Figure:
    """Turn the times of each kind into the figure."""
    measures, conditions = [], []
    for (leg, requests, workers), kinds in spent_ms.items():
        every = [spent for times in kinds.values() for spent in times]
        key, what = f"{leg}_{requests}_{workers}", f"{leg}, {requests} requests, {workers} workers"
        goal_ms = SIZES[requests, workers]
        measures += [
            at_most(f"{key}_median_ms", f"{what}: median", statistics.median(every), "ms", goal_ms),
            at_most(f"{key}_worst_ms", f"{what}: worst", max(every), "ms", goal_ms),
        ]
        each = [f"{kind} {statistics.median(times):.1f} ({max(times):.1f})" for kind, times in kinds.items()]
        conditions.append(f"{what}, median (worst) ms: {', '.join(each)}")
    return Figure(
        name="snapshot",
        title="exact optimum of one leg's snapshot, CPU of the one thread that a call takes",
        measures=tuple(measures),
        conditions=tuple(conditions),
    )


def instance(kind: str, requests: int, workers: int, seed: int) -> Instance:
    """Draw a snapshot.

    identical: nothing but ties.  homogeneous: equal workers, nothing cached.  straggler: one is 5x slower.
    cache-heavy: prompts share prefixes that some workers hold, and speeds differ up to 5x.  random: every
    time is drawn on its own.
    """
    random = np.random.default_rng((seed, KINDS.index(kind), requests))
    k = np.arange(requests + 1)
    tokens: Floats = np.clip(random.lognormal(6.5, 1.0, requests), 16, 32_000).round()[:, None]
    backlog_s = random.exponential(0.2, workers)
    slow = np.ones(workers)
    uncached, moved = np.broadcast_to(tokens, (requests, workers)), np.zeros((requests, workers))
    if kind == "identical":
        uncached, tokens, backlog_s = np.full_like(uncached, 1000.0), np.full_like(tokens, 1000.0), moved[0]
    elif kind == "straggler":
        slow[0] = SLOW
    elif kind == "cache-heavy":
        slow = random.uniform(1.0, SLOW, workers)
        group = random.integers(0, PREFIX_GROUPS, requests)
        elsewhere = (random.random((PREFIX_GROUPS, workers)) > HELD_FRAC)[group]
        uncached = tokens + random.integers(200, 4000, PREFIX_GROUPS)[group][:, None] * elsewhere
        moved = MOVE_S_PER_TOKEN * tokens * elsewhere
    processing_s = slow * (PREFILL_S + PREFILL_S_PER_TOKEN * uncached)
    extra_s = slow * ITERATION_S_PER_TOKEN * tokens + moved
    if kind == "random":
        processing_s = random.uniform(0.01, 1.0, (requests, workers))
        extra_s = random.uniform(0.0, 0.05, (requests, workers))
        slow = random.uniform(1.0, SLOW, workers)
    iteration_s = np.outer(slow, ITERATION_S + ITERATION_S_PER_REQUEST * k)
    iteration_s[:, 0] = 0.0
    return Instance((processing_s, backlog_s), (iteration_s, extra_s))
