"""A block of live graphs: cells of several policies on workers of the same kind, one graph a policy."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Policy, Result
from dynamo_poa.bench.suites.live import Block
from dynamo_poa.serve.rundir import runtime_dir
from dynamo_poa.workloads.arrivals import Closed, Load, Poisson
from dynamo_poa.workloads.synthetic import Paper

pytestmark = pytest.mark.dynamo

FLEET = Fleet(name="3A", prefill=0, decode=3, speedup=2.0, kv_blocks=2048)
NATIVE = Policy(name="kv")
OURS = Policy(name="ours", plugin="active")
REFUSED = Policy(name="refused", plugin="active", credit_decay=1.0)
WORKERS = {"aggregated-0", "aggregated-1", "aggregated-2"}


def cell(policy: Policy, load: Load, learn_s: float = 0.0) -> Cell:
    return Cell(
        suite="test",
        engine="live",
        fleet=FLEET,
        content=Paper(output_tokens=8),
        load=load,
        policy=policy,
        seed=1,
        learn_s=learn_s,
        warm_up_s=1.0,
        seconds=2.0,
    )


def run_dirs() -> set[Path]:
    """Return this process's own; a graph that is gone has none."""
    return set(runtime_dir().glob(f"poa-{os.getpid()}-*")) if runtime_dir().exists() else set()


def check(result: Result) -> None:
    """Check what holds of any cell, however busy the machine is."""
    assert result.state in ("done", "void"), result.reason
    figures = result.figures
    assert figures["failed"] == 0
    assert figures["requests"] >= 8
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"] <= figures["e2e_p99_s"]
    assert 0.2 <= figures["cached_frac"] <= 0.6  # half of each prompt is one of five templates
    assert set(result.picks) == WORKERS
    assert {"cpu.frontend", "cpu.worker-0", "cpu.nats"} <= set(result.health)
    assert {point.phase for point in result.series} == ({""} if result.cell.policy.plugin else set())
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result


def phased(policy: Policy) -> Cell:
    phases = (
        Phase(name="below", load=Closed(users=2), seconds=1.5),
        Phase(name="above", load=Closed(users=12), seconds=1.5),
    )
    return msgspec.structs.replace(cell(policy, phases[0].load), seconds=0.0, phases=phases)


def check_phases(result: Result) -> None:
    """Check that each phase has its own load, figures and points."""
    assert result.state in ("done", "void"), result.reason
    assert result.figures["above.throughput_rps"] > result.figures["below.throughput_rps"] > 0
    assert "throughput_rps" not in result.figures
    assert [point.phase for point in result.series] == sorted((p.phase for p in result.series), reverse=True)
    assert {point.phase for point in result.series} == {"below", "above"}
    instants_s = [point.at_s for point in result.series]
    assert instants_s == sorted(instants_s)
    assert {point.regime for point in result.series} <= {"below", "transition", "saturated"}


async def test_policies_take_turns_on_graphs_of_their_own_and_a_dead_graph_fails_its_cells_alone() -> None:
    """Issue 5: policies interleave; of a graph that dies the finished cells are kept and the rest marked."""
    async with Block(FLEET, (NATIVE, OURS, REFUSED)) as block:
        native = await block.run(cell(NATIVE, Closed(users=6), learn_s=1.0))
        ours = await block.run(cell(OURS, Poisson(rate_rps=20)))
        other = await block.run(
            cell(NATIVE, Closed(users=4), learn_s=1.0)
        )  # the same seed: its prompts are new all the same
        for result in (native, ours, other):
            check(result)
        assert sum(native.picks.values()) == native.figures["requests"]
        assert (native.health["loaded_s"], ours.health["loaded_s"]) == (2.0, 1.0)
        assert 2 + 2 + 1 <= other.health["loaded_s"] < 2 + 2 + 1 + 1  # a graph learns but once
        assert "poa_hat" not in native.figures
        assert {"cpu.router", "cpu.controller"} <= set(ours.health)

        refused = await block.run(cell(REFUSED, Closed(users=6)))
        assert (refused.state, refused.figures) == ("failed", {})
        assert "credit_decay = 1: must be 0" in refused.reason

        dying = asyncio.create_task(block.run(cell(NATIVE, Closed(users=6))))
        await asyncio.sleep(1.5)
        await block.graph(NATIVE.name).kill("worker-0", signal.SIGKILL)
        dead = await dying
        assert (dead.state, dead.figures) == ("failed", {})
        assert "worker-0" in dead.reason

        given_up = asyncio.create_task(block.run(cell(OURS, Closed(users=6))))
        await asyncio.sleep(0.8)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        check_phases(await block.run(phased(OURS)))
    assert run_dirs() == set()
