"""The order of cells, and what a failure, a death, a full disk and Ctrl-C cost: fake engines, real store."""

import asyncio
import gc
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
from suite_results import FLEET, cell, done, stamp

from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Policy, Result
from dynamo_poa.bench.suites.runner import Block, Engines, blocks, failed, ordered, run
from dynamo_poa.bench.suites.store import Store, StoreError, read
from dynamo_poa.errors import ConfigError, StartError
from dynamo_poa.workloads.arrivals import Closed
from dynamo_poa.workloads.synthetic import Zipf

POLICIES = ("kv", "random", "round-robin", "ours")
SMALL, BIG = FLEET, Fleet(name="4P/4D", prefill=4, decode=4)


@contextmanager
def threads(width: int) -> Iterator[Executor]:
    with ThreadPoolExecutor(width) as pool:
        yield pool


@contextmanager
def processes(width: int) -> Iterator[Executor]:
    with ProcessPoolExecutor(width, mp_context=get_context("spawn")) as pool:
        yield pool


def fine(one: Cell) -> Result:
    return done(one, ttft_mean_s=float(one.seed))


def refuses_seed_2(one: Cell) -> Result:
    if one.seed == 2:
        raise ConfigError(["fleet.slow: cannot", "phases: cannot"])
    return fine(one)


def dies_of_seed_2(one: Cell) -> Result:
    if one.seed == 2:
        os._exit(1)
    return fine(one)


class FakeBlock:
    """Graphs on which every cell goes well but those that `wrong` knows of; remembers what was asked."""

    def __init__(self, wrong: Callable[[Cell], Result | None] = lambda one: None) -> None:
        self.wrong = wrong
        self.served: list[tuple[str, tuple[str, ...], float]] = []
        self.ran: list[Cell] = []
        self.stopped = 0

    @asynccontextmanager
    async def serve(
        self, fleet: Fleet, policies: tuple[Policy, ...], window_s: float
    ) -> AsyncIterator[Block]:
        self.served.append((fleet.name, tuple(sorted(policy.name for policy in policies)), window_s))
        try:
            yield self
        finally:
            self.stopped += 1

    async def run(self, cell: Cell) -> Result:
        self.ran.append(cell)
        return self.wrong(cell) or fine(cell)


def engines(
    block: FakeBlock | None = None,
    replayed: Callable[[Cell], Result] = fine,
    pool: Callable[[int], AbstractContextManager[Executor]] = threads,
) -> Engines:
    return Engines(pool=pool, replayed=replayed, block=(block or FakeBlock()).serve)


def live(policy: str, seed: int = 1, fleet: Fleet = SMALL, users: int = 8) -> Cell:
    return cell(policy, seed, Closed(users=users), "live", fleet, seconds=12.0)


async def results_of(cells: list[Cell], by: Engines) -> list[Result]:
    kept: list[Result] = []
    await run(cells, by, kept.append)
    return kept


def test_policies_of_a_workload_and_seed_are_run_next_to_one_another_seeds_one_after_the_other() -> None:
    """Issue: interleaved and paired. A run that is cut short has whole seeds."""
    cells = [
        live(policy, seed, users=users) for policy in POLICIES for seed in (2, 1, 3) for users in (8, 16)
    ]
    found = ordered(cells)
    slots = [found[at : at + len(POLICIES)] for at in range(0, len(found), len(POLICIES))]
    assert [(slot[0].seed, slot[0].load) for slot in slots] == [
        (seed, Closed(users=users)) for seed in (1, 2, 3) for users in (8, 16)
    ]
    for slot in slots:
        assert len({(one.seed, one.group) for one in slot}) == 1
        assert {one.policy.name for one in slot} == set(POLICIES)


def test_the_order_within_is_of_chance_but_the_same_every_time() -> None:
    """Shuffled per seed, so that no policy is always first after the last one's load; however they came."""
    cells = [live(policy, seed) for policy in POLICIES for seed in range(1, 41)]
    found = ordered(cells)
    assert ordered(reversed(cells)) == found
    first = Counter(one.policy.name for one in found[:: len(POLICIES)])
    assert all(count >= 3 for count in first.values())
    assert set(first) == set(POLICIES)


async def test_replays_come_first_and_graphs_are_started_once_a_fleet() -> None:
    """Every cell ends in one result."""
    block = FakeBlock()
    cells = [live(policy, seed, fleet) for fleet in (SMALL, BIG) for policy in POLICIES for seed in (1, 2)]
    cells += [cell(policy, seed) for policy in POLICIES for seed in (1, 2)]
    kept = await results_of(cells, engines(block))
    assert Counter(one.cell.id for one in kept) == Counter(one.id for one in cells)
    assert [one.cell.engine for one in kept] == ["replay"] * 8 + ["live"] * 16
    names = tuple(sorted(POLICIES))
    assert block.served == [("2P/4D", names, 12.0), ("4P/4D", names, 12.0)]
    assert block.stopped == 2


def test_two_policies_of_one_name_are_never_up_together() -> None:
    """`kv best` is another setting for another workload; workloads that agree share their graphs."""

    def best(temperature: float, content: Zipf) -> Cell:
        policy = Policy(name="kv best", router_temperature=temperature)
        return msgspec.structs.replace(live("kv"), policy=policy, content=content)

    one, two, three = Zipf(prefixes=1), Zipf(prefixes=2), Zipf(prefixes=3)
    plain = [msgspec.structs.replace(live("kv"), content=content) for content in (one, two, three)]
    found = blocks([*plain, best(0.3, one), best(0.7, two), best(0.3, three)])
    assert [{member.content for member in block} for block in found] == [{one, three}, {two}]
    assert sum(map(len, found)) == 6


async def test_poa_hats_window_is_no_longer_than_what_is_measured_nor_outside_its_bounds() -> None:
    """10 s is the least the controller takes, 20 s what the sweep uses."""
    for seconds, window_s in ((5.0, 10.0), (15.0, 15.0), (60.0, 20.0)):
        block = FakeBlock()
        await results_of([msgspec.structs.replace(live("kv"), seconds=seconds)], engines(block))
        assert block.served[0][2] == window_s
    block = FakeBlock()
    phases = tuple(Phase(name=str(s), load=Closed(users=8), seconds=s) for s in (30.0, 14.0))
    await results_of([msgspec.structs.replace(live("kv"), seconds=0.0, phases=phases)], engines(block))
    assert block.served[0][2] == 14.0


async def test_what_an_engine_refuses_is_a_failed_cell_with_the_reasons() -> None:
    """Both engines; the others go on."""

    def refuse(one: Cell) -> Result | None:
        return refuses_seed_2(one)

    for cells in ([cell(seed=seed) for seed in (1, 2, 3)], [live("kv", seed) for seed in (1, 2, 3)]):
        kept = await results_of(cells, engines(FakeBlock(refuse), refuses_seed_2))
        assert {one.cell.seed: (one.state, one.reason) for one in kept} == {
            1: ("done", ""),
            2: ("failed", "fleet.slow: cannot\nphases: cannot"),
            3: ("done", ""),
        }


async def test_a_simulator_that_dies_costs_the_cell_that_killed_it_and_no_other() -> None:
    """A process of the pool exits: what was under way beside it is run again."""
    cells = [cell(policy, seed) for policy in ("kv", "random") for seed in (1, 2, 3)]
    kept = await results_of(cells, engines(replayed=dies_of_seed_2, pool=processes))
    found = {(one.cell.policy.name, one.cell.seed): (one.state, one.reason) for one in kept}
    assert len(kept) == len(found) == 6
    for (_, seed), ended in found.items():
        assert ended == (("failed", "the simulator's process died") if seed == 2 else ("done", ""))


class Broken(Executor):
    """A pool whose processes do not even start."""

    def submit(self, *_: object, **__: object) -> Future[Result]:
        raise BrokenProcessPool("no process")


async def test_a_pool_that_cannot_begin_fails_its_cells_and_the_run_goes_on() -> None:
    """Found in review: with nothing under way it waited for nothing, which asyncio refuses."""
    cells = [cell(seed=1), cell(seed=2), live("kv")]
    kept = await results_of(cells, engines(pool=lambda width: Broken()))
    assert [(one.state, one.reason) for one in kept] == [
        ("failed", "the simulator's process died"),
        ("failed", "the simulator's process died"),
        ("done", ""),
    ]


class Endless(Executor):
    """A pool whose one job goes on until somebody ends it."""

    def __init__(self) -> None:
        self.job: Future[Result] = Future()

    def submit(self, *_: object, **__: object) -> Future[Result]:
        self.job.set_running_or_notify_cancel()
        return self.job


async def test_processes_that_die_of_the_signal_that_ends_the_run_say_nothing_more() -> None:
    """Found in review: SIGTERM to a whole group ended in a traceback of a future nobody had asked."""
    pool, said = Endless(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
    under_way = asyncio.create_task(results_of([cell()], engines(pool=lambda width: pool)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert pool.job.running()
    under_way.cancel()
    await asyncio.wait([under_way])
    assert under_way.cancelled()
    pool.job.set_exception(BrokenProcessPool("killed"))
    for _ in range(3):
        await asyncio.sleep(0)
    del under_way, pool.job  # a future complains when it goes
    gc.collect()
    assert said == []


async def test_a_graph_that_died_is_given_up_after_two_cells_and_the_others_go_on() -> None:
    """Issue: a dead graph mid-run: finished cells kept, the rest marked, with the reason."""

    def dies(one: Cell) -> Result | None:
        dead = one.policy.name == "random" and one.seed > 1
        return failed(one, f"a process died: seed {one.seed}") if dead else None

    block = FakeBlock(dies)
    kept = await results_of(
        [live(policy, seed) for policy in POLICIES for seed in range(1, 7)], engines(block)
    )
    reasons = {one.cell.seed: one.reason for one in kept if one.cell.policy.name == "random"}
    given_up = "not run: its graph failed 2 times in a row, the last time: a process died: seed 3"
    assert reasons == {
        1: "",
        2: "a process died: seed 2",
        3: "a process died: seed 3",
        **dict.fromkeys((4, 5, 6), given_up),
    }
    assert {one.state for one in kept if one.cell.policy.name != "random"} == {"done"}
    assert len(block.ran) == 24 - 3


async def test_one_good_cell_between_two_bad_ones_keeps_a_graph() -> None:
    """It was restarted meanwhile."""

    def every_other(one: Cell) -> Result | None:
        return failed(one, "hiccup") if one.seed % 2 else None

    kept = await results_of([live("kv", seed) for seed in range(1, 7)], engines(FakeBlock(every_other)))
    assert [one.state for one in kept] == ["failed", "done"] * 3


async def test_graphs_that_do_not_start_cost_their_fleets_cells_alone() -> None:
    """The next fleet is served."""

    class Fails(FakeBlock):
        @asynccontextmanager
        async def serve(
            self, fleet: Fleet, policies: tuple[Policy, ...], window_s: float
        ) -> AsyncIterator[Block]:
            if fleet == SMALL:
                raise StartError("frontend: port in use")
            yield self

    kept = await results_of(
        [live("kv", seed, fleet) for fleet in (SMALL, BIG) for seed in (1, 2)], engines(Fails())
    )
    assert [(one.cell.fleet.name, one.state, one.reason) for one in kept] == [
        ("2P/4D", "failed", "not run: its graphs did not start: frontend: port in use"),
        ("2P/4D", "failed", "not run: its graphs did not start: frontend: port in use"),
        ("4P/4D", "done", ""),
        ("4P/4D", "done", ""),
    ]


async def test_a_full_disk_ends_the_run_with_the_graphs_stopped(tmp_path: Path) -> None:
    """It is no fault of a cell: nothing is marked as failed for it, and nothing more is run."""
    block, kept = FakeBlock(), list[Result]()

    def keep(result: Result) -> None:
        if len(kept) == 2:
            raise StoreError("no room")
        kept.append(result)

    with pytest.raises(StoreError, match="no room"):
        await run([live("kv", seed) for seed in range(1, 7)], engines(block), keep)
    assert (len(kept), len(block.ran), block.stopped) == (2, 3, 1)
    assert {one.state for one in kept} == {"done"}


async def test_an_interrupted_run_keeps_what_was_finished_and_is_gone_on_with(tmp_path: Path) -> None:
    """Issue: Ctrl-C keeps what is finished and the run resumes where it stopped; graphs are stopped."""
    cells = [live("kv", seed) for seed in range(1, 5)]
    reached = asyncio.Event()

    class Hangs(FakeBlock):
        async def run(self, cell: Cell) -> Result:
            if cell.seed == 3:
                reached.set()
                await asyncio.Event().wait()
            return await super().run(cell)

    hanging = Hangs()
    with Store.open(tmp_path, stamp(), cells) as store:
        running = asyncio.create_task(run(cells, engines(hanging), store.add))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert hanging.stopped == 1
    contents = read(store.path)
    assert {one.cell.seed: one.state for one in contents.results} == {
        1: "done",
        2: "done",
        3: "failed",
        4: "failed",
    }
    block = FakeBlock()
    with Store.open(tmp_path, stamp(), cells) as store:
        await run([one for one in cells if one.id not in store.contents.done], engines(block), store.add)
    assert [one.seed for one in block.ran] == [3, 4]
    assert {one.state for one in read(store.path).results} == {"done"}
