"""Results that look like a suite's: smooth in load, noisy by seed, every kind of cell a report must show."""

import random
from collections.abc import Iterator, Sequence

from dynamo_poa.bench.report import Machine
from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Point, Policy, Result, SlowWorker, Stamp
from dynamo_poa.workloads.arrivals import Closed, Load, Poisson
from dynamo_poa.workloads.synthetic import Content, Paper, Zipf

DEFAULT = Policy(name="kv")
ROUND_ROBIN = Policy(name="round-robin", router_mode="round-robin")
SCALED = Policy(name="kv scale 4", prefill_load_scale=4.0)
OURS = Policy(name="poa active", plugin="active")
# How many times the default's latency each policy takes.
FACTORS = {DEFAULT.name: 1.0, ROUND_ROBIN.name: 1.3, SCALED.name: 0.85, OURS.name: 1.0}
FLEET = Fleet(name="2P/4D", prefill=2, decode=4)
SLOW_FLEET = Fleet(
    name="2P/4D, one 5x slow", prefill=2, decode=4, slow=(SlowWorker(role="decode", number=3, factor=5.0),)
)
SEEDS = (1, 2, 3)
USERS = (8, 16, 32, 64, 128)


def stamp(suite: str = "workloads", cells: int = 120) -> Stamp:
    """A build stamp."""
    machine = Machine(
        processor="Example CPU <3 GHz>",
        cores=2,
        system="Linux 6.1",
        python="3.11.2",
        nats_server="nats-server: v2.10.20",
        packages={"dynamo-poa": "0.1.0", "ai-dynamo": "1.4.2", "msgspec": "0.23.0"},
        commit="0123456789ab",
    )
    return Stamp(
        suite=suite,
        machine=machine,
        command=f"dynamo-poa bench run {suite} --out results",
        seeds=SEEDS,
        cells=cells,
        started_at="2026-11-29T12:00:00Z",
    )


def cell(
    policy: Policy = DEFAULT,
    load: Load | None = None,
    seed: int = 1,
    *,
    fleet: Fleet = FLEET,
    content: Content | None = None,
    suite: str = "workloads",
    phases: tuple[Phase, ...] = (),
) -> Cell:
    """A cell, live where a replay could not run it."""
    live = policy.plugin or fleet.slow or phases
    return Cell(
        suite=suite,
        engine="live" if live else "replay",
        fleet=fleet,
        content=content or Paper(),
        load=load or Closed(users=8),
        policy=policy,
        seed=seed,
        phases=phases,
    )


def figures(at: float, factor: float, noise: float, knee: float = 64.0) -> dict[str, float]:
    """Figures of a fleet whose latency bends at `knee`."""
    pressure = 1 + (at / knee) ** 2
    ttft_s = 0.05 * pressure * factor * noise
    return {
        "ttft_mean_s": ttft_s,
        "ttft_p50_s": ttft_s * 0.8,
        "ttft_p99_s": ttft_s * 3.5 * (1 + (factor - 1) / 2),
        "itl_mean_s": 0.012 * pressure**0.5,
        "itl_p50_s": 0.011 * pressure**0.5,
        "itl_p99_s": 0.02 * pressure**0.5 * noise,
        "e2e_mean_s": ttft_s + 0.8 * pressure**0.5,
        "e2e_p50_s": ttft_s + 0.7 * pressure**0.5,
        "e2e_p99_s": ttft_s * 3.5 + 1.2 * pressure**0.5,
        "throughput_rps": at / (ttft_s + 0.8 * pressure**0.5),
        "cached_frac": 0.45,
        "requests": 500.0,
        "failed": 0.0,
    }


def _picks(fleet: Fleet, policy: Policy, rng: random.Random) -> dict[str, int]:
    spread = 0.02 if policy is ROUND_ROBIN else 0.25
    slow = {(worker.role, worker.number) for worker in fleet.slow} if policy is OURS else set()
    return {
        f"{role}-{number}": int(
            500 / of * (0.3 if (role, number) in slow else rng.uniform(1 - spread, 1 + spread))
        )
        for role, of in (("prefill", fleet.prefill), ("decode", fleet.decode))
        for number in range(of)
    }


def result(made: Cell, factor: float = 1.0, at: float | None = None) -> Result:
    """A cell's result; the same cell's is the same."""
    load = made.load
    at = at if at is not None else load.users if isinstance(load, Closed) else getattr(load, "rate_rps", 1.0)
    # Not of the cell's id: a field that cells are given later must not change what these results are.
    asked = f"{made.group} {made.seed}"
    shared, own = random.Random(asked), random.Random(f"{asked} {made.policy.name}")
    noise = shared.uniform(0.85, 1.15) * own.uniform(0.99, 1.01)
    series = ()
    found = figures(at, factor, noise)
    if made.policy.plugin:
        regime = "below" if at < 64 else "transition" if at < 128 else "saturated"
        found |= {"poa_hat": 1 + (at / 64) ** 1.5 * noise, "poa_low": 1.0, "poa_high": 9.0}
        series = tuple(Point(at_s=1000.0 + i, regime=regime) for i in range(3))
    return Result(
        cell=made, state="done", figures=found, picks=_picks(made.fleet, made.policy, own), series=series
    )


def workloads(policies: Sequence[Policy] = (DEFAULT, ROUND_ROBIN, SCALED, OURS)) -> list[Result]:
    """Four policies on two fleets under two contents, five loads and three seeds."""
    return [
        result(cell(policy, load, seed, fleet=fleet, content=content), FACTORS[policy.name])
        for fleet, content, loads in (
            (FLEET, Paper(), [Closed(users=users) for users in USERS]),
            (FLEET, Zipf(), [Poisson(rate_rps=rate) for rate in USERS]),
            (SLOW_FLEET, Paper(), [Closed(users=users) for users in USERS]),
        )
        for load in loads
        for policy in policies
        for seed in SEEDS
    ]


def grid() -> list[Result]:
    """Four values of τ and of ω below and at saturation, the default among them."""
    settings = [
        Policy(name=f"τ {tau:g}, ω {omega:g}", router_temperature=tau, overlap_credit=omega)
        for tau in (0.0, 0.3, 0.7, 1.0)
        for omega in (0.0, 0.5, 1.0, 2.0)
    ]
    return [
        result(
            cell(setting, Closed(users=users), seed, suite="paper-4"),
            1 + (setting.router_temperature * 0.2 + abs(setting.overlap_credit - 1) * 0.1) * (users > 64),
        )
        for users in (16, 128)
        for setting in settings
        for seed in SEEDS
    ]


def splits(workers: int = 8) -> list[Result]:
    """Every split of the workers under three loads: more prefill workers, less TTFT and more ITL."""

    def made(prefill: int, rate: float, seed: int) -> Result:
        fleet = Fleet(name=f"{prefill}P/{workers - prefill}D", prefill=prefill, decode=workers - prefill)
        found = result(cell(DEFAULT, Poisson(rate_rps=rate), seed, fleet=fleet, suite="splits"))
        worse_s = 0.02 * rate / (workers - prefill)
        return Result(
            cell=found.cell,
            state="done",
            figures={
                **figures(rate, 3.0 / prefill, 1.0 + seed / 100),
                "itl_p99_s": worse_s,
                "itl_mean_s": worse_s / 2,
                "throughput_rps": min(rate, 6.0 * prefill, 9.0 * (workers - prefill)),
            },
        )

    return [made(p, rate, seed) for p in range(1, workers) for rate in (4.0, 16.0, 32.0) for seed in SEEDS]


def over_phases() -> list[Result]:
    """Adaptive and static over below, saturated, below."""
    phases = tuple(
        Phase(name=name, load=Closed(users=users), seconds=20.0)
        for name, users in (("below", 16), ("saturated", 256), ("after", 16))
    )
    policies = (Policy(name="poa off", plugin="off"), OURS)
    return [
        _phased(cell(policy, phases[0].load, seed, suite="paper-3", phases=phases))
        for policy in policies
        for seed in SEEDS
    ]


def _phased(made: Cell) -> Result:
    adaptive = made.policy is OURS
    found = {
        f"{phase.name}.{key}": value * (1 + made.seed / 200)
        for phase in made.phases
        for key, value in figures(
            phase.load.users, 0.7 if adaptive and phase.name == "saturated" else 1.0, 1.0
        ).items()
    }
    return Result(
        cell=made,
        state="done",
        figures=found,
        picks=_picks(made.fleet, made.policy, random.Random(made.id)),
        series=tuple(_points(made, adaptive=adaptive)),
    )


def _points(made: Cell, *, adaptive: bool) -> Iterator[Point]:
    rng = random.Random(made.id)
    for tick in range(120):
        phase = made.phases[tick // 40]
        loaded = phase.name == "saturated"
        up = adaptive and loaded and tick > 45
        yield Point(
            at_s=50_000.0 + tick / 2,
            phase=phase.name,
            regime="transition" if loaded and tick > 45 else "below",
            poa_hat=None if tick < 4 else (1.2 + loaded * (1 if up else 3)) * rng.uniform(0.9, 1.1),
            ttft_p99_s=(0.2 + loaded * (1 if up else 2)) * rng.uniform(0.9, 1.1),
            router_temperature=0.7 if up else 0.0,
            overlap_weight=1.0,
        )


def void_and_failed() -> list[Result]:
    """A cell of either kind, with figures where there are any."""
    return [
        Result(
            cell=cell(OURS, Closed(users=256), 2, fleet=SLOW_FLEET),
            state="void",
            reason="the processors were busy for 93 %, more than 85 %",
            figures=figures(9999.0, 50.0, 1.0),
            picks={"prefill-0": 77},
        ),
        Result(
            cell=cell(OURS, Closed(users=256), 3), state="failed", reason="router exited with 1: <no NATS>"
        ),
    ]
