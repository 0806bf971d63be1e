"""Which static parameters serve a trace best below, at and above its knee, and whether any is worth a change.

Owns: which loads and settings are tried, what capacity and knee mean, which setting is chosen and when the
      defaults stay.
Does not own: the simulator (replayed.py), what counts as a difference (paired.py), the YAML (fragment.py).
Invariant: a setting is chosen on the first half of the trace and taken only if it beats the default on the
           second half too, outside the noise. Only what `serve` can be told is tried.
Source:   the paper's regimes (Prop. 4); τ and ω mean what PoaController.policy and PoaRouter.overlap_key say.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import profiles
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result
from dynamo_poa.bench.suites.paired import Comparison, compare
from dynamo_poa.errors import ConfigError
from dynamo_poa.values import Regime
from dynamo_poa.workloads import stream
from dynamo_poa.workloads.arrivals import Closed, Load, TraceTimes
from dynamo_poa.workloads.synthetic import Trace

FIGURE = "ttft_mean_s"
ALSO = ("ttft_p99_s", "e2e_mean_s", "throughput_rps")  # must not be worse
CURVE = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)  # offered, of capacity
KNEE_FACTOR = 2.0
# Of the knee; of capacity: above it queues grow as long as the trace does, and chance with them.
BELOW_FRAC, ABOVE_FRAC = 0.6, 0.95
USERS = (32, 128)  # of each worker in the larger pool, for capacity
MAX_WORKERS = 500  # of one kind: their users are then within a closed loop's bound
BLOCK_TOKENS = 64  # measured: mean TTFT as with 16 within 1 %, in less than half the time
SPREAD_S = 3.0  # what Mooncake's times are rounded to
TUNE_SEEDS, VERIFY_SEEDS = (1, 2, 3), tuple(range(11, 27))
FINALISTS = 3
SCREENED = 1000  # requests: enough to tell which settings are not worth a second look

OverlapKey = Literal["overlap_score_credit", "prefill_load_scale"]
Run = Callable[[Sequence[Cell]], list[Result]]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """τ, and ω as one of the two Dynamo settings it may become; the other one stays 1."""

    router_temperature: float = 0.0
    overlap_weight: float = 1.0
    overlap_key: OverlapKey = "overlap_score_credit"

    @property
    def effect(self) -> tuple[float, float, float]:
        """Return τ, credit and scale: two settings with the same are one."""
        scales = self.overlap_key == "prefill_load_scale"
        credit, scale = (1.0, self.overlap_weight) if scales else (self.overlap_weight, 1.0)
        return self.router_temperature, credit, scale

    @property
    def policy(self) -> Policy:
        """Return it as the simulator is told."""
        temperature, credit, scale = self.effect
        return Policy(
            name=self.text,
            router_temperature=temperature,
            overlap_credit=credit,
            prefill_load_scale=scale,
        )

    @property
    def text(self) -> str:
        """Return it for a person."""
        return f"τ = {self.router_temperature:g}, {self.overlap_key} = {self.overlap_weight:g}"

    @property
    def is_default(self) -> bool:
        """Tell whether this is what Dynamo does unasked."""
        return self.effect == (0.0, 1.0, 1.0)


DEFAULT = Setting()
TEMPERATURES = (0.0, 0.3, 0.7)
WEIGHTS: dict[OverlapKey, tuple[float, ...]] = {
    "overlap_score_credit": (0.1, 0.5, 1.0, 2.0),
    "prefill_load_scale": (0.5, 1.0, 2.0),
}


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How the default fares at one load."""

    offered_rps: float
    throughput_rps: float
    ttft_mean_s: float
    ttft_p99_s: float


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One regime: the setting for it and why.

    best:      of the first half, also where it was not taken
    tuned:     best against default there, over TUNE_SEEDS; None when every setting failed
    verified:  the same on the second half, over VERIFY_SEEDS; None when it was not ahead on the first
    beside:    other figures of the second half
    """

    regime: Regime
    offered_rps: float
    setting: Setting
    best: Setting
    tuned: Comparison | None = None
    verified: Comparison | None = None
    beside: tuple[Comparison, ...] = ()

    @property
    def why(self) -> str:
        """Return the evidence in a line."""
        if self.tuned is None or self.verified is None:
            return "leave the defaults: no setting did better on the first half"
        seen = f"mean TTFT {self.verified.text} on the second half"
        if self.setting.is_default:
            worse = [f"{c.figure} {c.text}" for c in self.beside if c.verdict == "worse"]
            return "; ".join([f"leave the defaults: {self.best.text}: {seen}", *worse])
        change = f"{(self.tuned.ratio or 1.0) - 1:+.1%}".replace("%", " %")
        return f"{seen}; {change} on the first"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace asks for on a fleet.

    capacity_rps:  most that closed loops got through
    knee_rps:      where the default's mean TTFT is KNEE_FACTOR times that of a light load
    theta1, theta2:  the default's TTFT P99 at the knee and at capacity, over that of a light load
    """

    trace: str
    fleet: Fleet
    requests: int
    capacity_rps: float
    knee_rps: float
    curve: tuple[LoadPoint, ...]
    overlap_key: OverlapKey
    choices: tuple[Choice, ...]
    theta1: float
    theta2: float

    @property
    def leaves_defaults(self) -> bool:
        """Tell whether nothing beat the defaults anywhere."""
        return all(choice.setting.is_default for choice in self.choices)


def fleet_of(topology: str, profile: str = "", kv_blocks: int = 0) -> Fleet:
    """Return the workers a topology such as `4P/4D` or `8A` stands for.

    Args:    profile: name or path.  kv_blocks: of each worker, of 16 tokens; 0 takes the profile's, or the
             engine's own.
    Raises:  ConfigError naming what is wrong.
    """
    found = re.fullmatch(r"(?:(\d+)P/(\d+)D|(\d+)A)", topology)
    counts = [int(number) for number in found.groups() if number] if found else []
    if not counts or min(counts) < 1:
        raise ConfigError([f"topology = {topology!r}: must be like 4P/4D or 8A, with one worker or more"])
    if counts == [1] or counts == [1, 1]:
        raise ConfigError([f"topology = {topology!r}: must leave the router a choice between workers"])
    if max(counts) > MAX_WORKERS:
        raise ConfigError([f"topology = {topology!r}: must have at most {MAX_WORKERS} workers of a kind"])
    prefill, decode = counts if len(counts) == 2 else (0, counts[0])
    fleet = Fleet(name=topology, prefill=prefill, decode=decode, profile=profile)
    if profile:
        profiles.path_of(profile)
    if not kv_blocks:
        kv_blocks = profiles.about(profile).kv_blocks if profile in profiles.names() else fleet.kv_blocks
    coarser = BLOCK_TOKENS // fleet.block_tokens
    return msgspec.structs.replace(fleet, block_tokens=BLOCK_TOKENS, kv_blocks=max(kv_blocks // coarser, 1))


def calibrate(trace: str, fleet: Fleet, run: Run, requests: int = 0) -> Calibration:
    """Find the parameters.

    Args:    trace: Mooncake JSONL.  run: carries cells out, in order.
             requests: of each half, at most; 0 for all.
    Raises:  ConfigError on a bad trace; MeasurementError when the default itself fails.
    """
    tuning, checking = (_Half(trace, part, fleet, run, requests) for part in ("first", "second"))
    capacity_rps = _capacity(tuning)
    offered_rps = [frac * capacity_rps for frac in CURVE]
    seen = tuning.run([(rate, DEFAULT, TUNE_SEEDS[0]) for rate in offered_rps])
    points = [_point(rate, result) for rate, result in zip(offered_rps, seen, strict=True)]
    knee_rps = knee(points)
    loads_rps = (BELOW_FRAC * knee_rps, knee_rps, ABOVE_FRAC * capacity_rps)
    screening = _Half(trace, "first", fleet, run, min(requests or SCREENED, SCREENED))
    key, finalists = _screen(screening, loads_rps)
    tuned = [_tune(tuning, rate, best) for rate, best in zip(loads_rps, finalists, strict=True)]
    choices = [
        _verify(checking, regime, rate, best)
        for regime, rate, best in zip(Regime, loads_rps, tuned, strict=True)
    ]
    p99_s = [point.ttft_p99_s for point in points]
    theta1, theta2 = (
        float(np.interp(rate, offered_rps, p99_s)) / p99_s[0] for rate in (knee_rps, capacity_rps)
    )
    return Calibration(
        trace=trace,
        fleet=fleet,
        requests=tuning.requests,
        capacity_rps=capacity_rps,
        knee_rps=knee_rps,
        curve=tuple(points),
        overlap_key=key,
        choices=tuple(choices),
        theta1=theta1,
        theta2=theta2,
    )


def runs_at_most() -> int:
    """Return how many cells a calibration runs, if every load's best is worth verifying."""
    tried = 1 + len({setting.effect for key in WEIGHTS for setting in settings(key)})
    finals = (1 + FINALISTS) * len(TUNE_SEEDS) + 2 * len(VERIFY_SEEDS)
    return len(USERS) + len(CURVE) + len(Regime) * (tried + finals)


def knee(points: Sequence[LoadPoint]) -> float:
    """Return the load at which mean TTFT is KNEE_FACTOR times that of the lightest, between the points.

    Raises:  MeasurementError when it never is: there is no knee to speak of.
    """
    limit_s = KNEE_FACTOR * points[0].ttft_mean_s
    for before, after in itertools.pairwise(points):
        if after.ttft_mean_s >= limit_s:
            rise = (limit_s - before.ttft_mean_s) / (after.ttft_mean_s - before.ttft_mean_s)
            return before.offered_rps + rise * (after.offered_rps - before.offered_rps)
    most = max(point.ttft_mean_s for point in points) / points[0].ttft_mean_s
    raise MeasurementError(
        f"no knee: at {points[-1].offered_rps:.3g} requests/s mean TTFT is {most:.2f} times that of a light "
        f"load, less than {KNEE_FACTOR:g}; the trace is too short to queue"
    )


class _Half:
    """One half of the trace on the fleet."""

    def __init__(
        self, trace: str, part: Literal["first", "second"], fleet: Fleet, run: Run, limit: int
    ) -> None:
        self._content, self._fleet, self._run = Trace(path=trace, part=part, limit=limit), fleet, run
        times_s = [
            request.at_s or 0.0
            for request in stream.requests(self._content, TraceTimes(), 1, fleet.block_tokens)
        ]
        self.requests = len(times_s)
        if not times_s or times_s[-1] <= 0:
            taken = f"trace {trace}, {part} half, --requests = {limit}: the {self.requests} requests taken"
            raise ConfigError([f"{taken} come at one instant: must come at two or more"])
        self.workers = max(fleet.prefill, fleet.decode)
        self._own_rps = self.requests / times_s[-1]

    def run(self, asked: Iterable[tuple[float, Setting, int]]) -> list[Result]:
        """Run it at some rates under some settings with some seeds."""
        return self.run_loads(
            (TraceTimes(speedup=rate_rps / self._own_rps, spread_s=SPREAD_S), setting, seed)
            for rate_rps, setting, seed in asked
        )

    def run_loads(self, asked: Iterable[tuple[Load, Setting, int]]) -> list[Result]:
        """Run it under some loads."""
        return self._run(
            [
                Cell(
                    suite="calibrate",
                    engine="replay",
                    fleet=self._fleet,
                    content=self._content,
                    load=load,
                    policy=setting.policy,
                    seed=seed,
                )
                for load, setting, seed in asked
            ]
        )


def _capacity(half: _Half) -> float:
    """Return the most that closed loops get through, in requests/s."""
    users = [count * half.workers for count in USERS]
    loops = half.run_loads([(Closed(users=count), DEFAULT, TUNE_SEEDS[0]) for count in users])
    return max(_figure(result, "throughput_rps") for result in loops)


def _point(offered_rps: float, result: Result) -> LoadPoint:
    return LoadPoint(
        offered_rps=offered_rps,
        throughput_rps=_figure(result, "throughput_rps"),
        ttft_mean_s=_figure(result, "ttft_mean_s"),
        ttft_p99_s=_figure(result, "ttft_p99_s"),
    )


def _figure(result: Result, name: str) -> float:
    if result.state != "done":
        raise MeasurementError(f"{result.cell.policy.name} at {result.cell.load.text}: {result.reason}")
    return result.figures[name]


def settings(key: OverlapKey) -> list[Setting]:
    """Return what is tried with ω as that key, but for the default."""
    tried = [
        Setting(router_temperature=temperature, overlap_weight=weight, overlap_key=key)
        for temperature in TEMPERATURES
        for weight in WEIGHTS[key]
    ]
    return [setting for setting in tried if not setting.is_default]


def _screen(half: _Half, loads_rps: Sequence[float]) -> tuple[OverlapKey, list[list[Setting]]]:
    """Run every setting once at every load; return the key to use, for there is one, and each load's best.

    The key is the one whose best settings gain most, added up over the loads.
    """
    tried = {key: settings(key) for key in WEIGHTS}
    every = {setting.effect: setting for setting in [DEFAULT, *itertools.chain.from_iterable(tried.values())]}
    results = half.run([(rate, setting, TUNE_SEEDS[0]) for rate in loads_rps for setting in every.values()])
    gains: dict[OverlapKey, float] = dict.fromkeys(tried, 0.0)
    best: dict[OverlapKey, list[list[Setting]]] = {key: [] for key in tried}
    for at in _batches(results, len(every)):
        seen = {
            effect: result.figures[FIGURE]
            for effect, result in zip(every, at, strict=True)
            if result.state == "done"
        }
        default_s = _figure(at[0], FIGURE)
        for key, family in tried.items():
            ranked = sorted((s for s in family if s.effect in seen), key=lambda s: seen[s.effect])
            best[key].append(ranked[:FINALISTS])
            if ranked:
                gains[key] += max(math.log(default_s / seen[ranked[0].effect]), 0.0)
    key = max(gains, key=lambda k: gains[k])
    return key, best[key]


def _tune(half: _Half, rate_rps: float, finalists: list[Setting]) -> tuple[Setting, Comparison] | None:
    """Return the finalist that does best over all seeds and its comparison with the default."""
    asked = [DEFAULT, *finalists]
    results = half.run([(rate_rps, setting, seed) for setting in asked for seed in TUNE_SEEDS])
    default, *others = _batches(results, len(TUNE_SEEDS))
    compared = [compare(of_one, default, FIGURE) for of_one in others]
    ranked = sorted(
        zip(finalists, compared, strict=True), key=lambda pair: pair[1].ratio if pair[1].ratio else math.inf
    )
    return ranked[0] if ranked else None


def _verify(half: _Half, regime: Regime, rate_rps: float, tuned: tuple[Setting, Comparison] | None) -> Choice:
    """Take the tuned setting if it is better on this half too and nothing else is worse.

    On the first half it need only come out ahead: the best of many is so by luck too, and it is here that
    luck is told from gain.
    """
    if tuned is None or (tuned[1].ratio or 1.0) >= 1.0:
        best, comparison = tuned or (DEFAULT, None)
        return Choice(regime=regime, offered_rps=rate_rps, setting=DEFAULT, best=best, tuned=comparison)
    best, comparison = tuned
    results = half.run([(rate_rps, setting, seed) for setting in (best, DEFAULT) for seed in VERIFY_SEEDS])
    ours, default = results[: len(VERIFY_SEEDS)], results[len(VERIFY_SEEDS) :]
    verified = compare(ours, default, FIGURE)
    beside = tuple(compare(ours, default, figure) for figure in ALSO)
    taken = verified.verdict == "better" and all(other.verdict != "worse" for other in beside)
    return Choice(
        regime=regime,
        offered_rps=rate_rps,
        setting=best if taken else DEFAULT,
        best=best,
        tuned=comparison,
        verified=verified,
        beside=beside,
    )


def _batches(results: Sequence[Result], size: int) -> list[Sequence[Result]]:
    return [results[start : start + size] for start in range(0, len(results), size)]
