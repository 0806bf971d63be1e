"""How quickly and how surely the regime follows the load, on simulated workers in virtual time.

Owns: the steps, the steady loads and the knee that are run, and the figure made of them.
Does not own: workers, clients and arrivals (simulated_fleet.py), any judgement, which is the real step's.
Invariant: seeded: the same figure on every machine. A run that was not right is counted, never left out.
"""

import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from dynamo_poa.bench.report import Figure, Measure, at_least, at_most, plain
from dynamo_poa.bench.simulated_fleet import Controlled, Shape
from dynamo_poa.bench.story import quantile
from dynamo_poa.values import Regime

WARM_UP_S, OVERLOAD_S, AFTER_S = 60.0, 10.0, 40.0
LOW, HIGH = 0.5, 1.2  # of capacity
SOON_S, SOON_REQUESTS, BACK_S = 3.0, 50, 10.0
STEADY = (0.3, 0.6, 0.8)
KNEE = (0.95, 1.0, 1.05, None)  # None wanders between the first and the last
KNEE_S, FLAP_S = 600.0, 30.0
NEVER_S = math.inf


class Step(NamedTuple):
    """One step up and back: after how long the regime was right, and whether it was in time."""

    up_s: float
    down_s: float
    in_time: bool


def step(workers: int, spread: float, seed: int) -> Step:
    """Go from LOW to HIGH for OVERLOAD_S and back."""
    capacity = Shape(workers=workers).capacity
    begins_s, ends_s = WARM_UP_S, WARM_UP_S + OVERLOAD_S

    def rate(at_s: float) -> float:
        return capacity * (HIGH if begins_s <= at_s < ends_s else LOW)

    run = Controlled(Shape(workers=workers, spread=spread, rate=rate), seed)
    run.run(begins_s)
    started = run.fleet.started
    run.run(ends_s + AFTER_S)
    up_s, requests = next(
        (
            (at_s - begins_s, count - started)
            for (at_s, regime, _), count in zip(run.changes, run.requests, strict=True)
            if regime is Regime.SATURATED and at_s > begins_s
        ),
        (NEVER_S, 0),
    )
    down_s = next(
        (at_s - ends_s for at_s, regime, _ in run.changes if regime is Regime.BELOW and at_s > ends_s),
        NEVER_S,
    )
    return Step(up_s, down_s, up_s <= SOON_S or (up_s < NEVER_S and requests <= SOON_REQUESTS))


def steady(load: float, seed: int, minutes: float) -> int:
    """Return how often the regime changed at a steady load."""
    capacity = Shape().capacity
    return len(Controlled(Shape(rate=lambda at_s: capacity * load), seed).run(60 * minutes))


def knee(load: float | None, seed: int, lasts_s: float = KNEE_S) -> int:
    """Return how often a regime was left and entered again within FLAP_S, with clients at the knee."""
    shape = Shape()
    holds = shape.capacity * (shape.think_s + shape.answer_s + 0.1)

    def clients(at_s: float) -> int:
        wanders = 1.0 + 0.05 * math.sin(at_s / 40)
        # They come over half a minute: all at once they would be an overload of their own.
        return round(holds * (wanders if load is None else load) * min(at_s / 30, 1.0))

    run = Controlled(Shape(clients=clients), seed)
    run.run(lasts_s)
    path = [(0.0, Regime.BELOW), *((at_s, regime) for at_s, regime, _ in run.changes)]
    return sum(
        later is before and back_s - left_s <= FLAP_S
        for (_, before), (left_s, _), (back_s, later) in zip(path, path[1:], path[2:], strict=False)
    )


def measure(minutes: float, seeds: int, say: Callable[[str], None]) -> Figure:
    """Run everything, steps over so many seeds and steady loads for so many minutes."""
    measures: list[Measure] = []
    with ProcessPoolExecutor(max_workers=2) as pool:
        for workers, spread in ((8, 0.43), (8, 1.0), (4, 0.43), (2, 0.43)):
            found = list(pool.map(step, [workers] * seeds, [spread] * seeds, range(seeds)))
            named = f"{workers} workers, spread {spread:g}"
            key = f"step_{workers}_{spread:g}".replace(".", "")
            measures += _of_steps(key, named, found, goal=workers == 8)
            say(f"{named}: saturated after {statistics.median(one.up_s for one in found):.2f} s")
        for load in STEADY:
            runs = max(seeds // 10, 2)
            changes = sum(pool.map(steady, [load] * runs, range(runs), [minutes] * runs))
            what = f"steady {load:.0%}: changes in {runs} x {minutes:g} min"
            measures.append(at_most(f"steady_{load * 100:.0f}", what, changes, "", 0))
            say(f"{what}: {changes}")
        for at in KNEE:
            runs = max(seeds // 20, 2)
            flaps = sum(pool.map(knee, [at] * runs, range(runs)))
            named = "95 to 105 %" if at is None else f"{at:.0%}"
            what = f"closed loop at {named}: flaps in {runs} x {KNEE_S / 60:g} min"
            key = "knee_wandering" if at is None else f"knee_{at * 100:.0f}"
            measures.append(at_most(key, what, flaps, "", 0))
            say(f"{what}: {flaps}")
    return figure(measures, seeds)


def figure(measures: list[Measure], seeds: int) -> Figure:
    """Return the figure with what a reader must know of it."""
    return Figure(
        name="detection",
        title=f"the regime after a step from {LOW:.0%} to {HIGH:.0%} of capacity and back, and steady",
        measures=tuple(measures),
        conditions=(
            f"simulated prefill workers in virtual time, 12.5 requests/s each, {seeds} seeds; Poisson "
            "arrivals, lognormal prompts of 2000 tokens in the mean, `spread` is variance over squared mean",
            "the real latency models, pressure, regime and step; a report after each pass, 1/s when idle",
            f"in time: saturated within {SOON_S:g} s or {SOON_REQUESTS} requests, whichever is later",
            "how soon an overload of 20 % can be told from chance is bounded by the noise of arrivals: with "
            "fewer workers there are fewer of them in the same time",
            f"a flap is a regime left and entered again within {FLAP_S:g} s",
        ),
    )


def _of_steps(key: str, named: str, found: list[Step], *, goal: bool) -> list[Measure]:
    ups, downs = [one.up_s for one in found], [one.down_s for one in found]
    in_time = 100 * sum(one.in_time for one in found) / len(found)
    back = 100 * sum(down_s <= BACK_S for down_s in downs) / len(found)
    soon = (f"{key}_in_time", f"{named}: saturated in time", in_time, "%")
    again = (f"{key}_back", f"{named}: below again within {BACK_S:g} s", back, "%")
    return [
        plain(f"{key}_median_s", f"{named}: saturated after, median", statistics.median(ups), "s"),
        plain(f"{key}_p95_s", f"{named}: saturated after, P95", quantile(ups, 0.95), "s"),
        at_least(*soon, 100) if goal else plain(*soon),
        plain(f"{key}_back_s", f"{named}: below again after, median", statistics.median(downs), "s"),
        at_least(*again, 100) if goal else plain(*again),
    ]
