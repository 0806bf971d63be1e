"""Cells and results of suites, for tests."""

from typing import Any, Literal

from dynamo_poa.bench.report import Machine
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result, Stamp
from dynamo_poa.workloads.arrivals import Closed, Load
from dynamo_poa.workloads.synthetic import Paper

FLEET = Fleet(name="2P/4D", prefill=2, decode=4)


def cell(
    policy: str = "kv",
    seed: int = 1,
    load: Load | None = None,
    engine: Literal["replay", "live"] = "replay",
    fleet: Fleet = FLEET,
    **rest: Any,
) -> Cell:
    """Return a cell of the suite `test`."""
    return Cell(
        suite="test",
        engine=engine,
        fleet=fleet,
        content=Paper(),
        load=load or Closed(users=8),
        policy=Policy(name=policy),
        seed=seed,
        requests=rest.pop("requests", 100),
        **rest,
    )


def done(of: Cell, **figures: float) -> Result:
    """Return a result with these figures."""
    return Result(cell=of, state="done", figures=figures)


def stamp(
    suite: str = "test",
    commit: str = "abc",
    seeds: tuple[int, ...] = (1, 2, 3),
    started_at: str = "2026-01-01T00:00:00Z",
) -> Stamp:
    """Return a stamp of a made-up machine."""
    machine = Machine(
        processor="P", cores=2, system="Linux", python="3.11", nats_server="n", packages={}, commit=commit
    )
    command = "bench run test"
    return Stamp(suite=suite, machine=machine, command=command, seeds=seeds, cells=3, started_at=started_at)
