"""One `bench run`: find the best static setting, measure, keep, tell.

Owns: the steps of a run and their two files, which engines there are, what is told at the end.
Does not own: options (command.py), the order of cells (runner.py), files (store.py), progress (progress.py).
Invariant: the setting `kv best` stands for is chosen once, on seeds of its own, and kept with the results.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from dynamo_poa.bench.report import this_machine
from dynamo_poa.bench.suites import baselines, live, replayed, runner
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result, Stamp
from dynamo_poa.bench.suites.progress import Meter, Teller
from dynamo_poa.bench.suites.store import Store
from dynamo_poa.clock import Clock

UNSETTLED = "not run: no best setting was found, see the failed cells of {file}"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    suite: str
    cells: tuple[Cell, ...]
    folder: Path
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ()
    fresh: bool = False


def real_engines() -> runner.Engines:
    """Return Dynamo's simulator and live graphs."""

    def block(
        fleet: Fleet, policies: tuple[Policy, ...], poa_window_s: float
    ) -> AbstractAsyncContextManager[runner.Block]:
        return live.Block(fleet, policies, poa_window_s=poa_window_s)

    return runner.Engines(pool=replayed.pool, replayed=replayed.run, block=block)


async def run_suite(asked: Asked, engines: runner.Engines, told: Console, clock: Clock) -> bool:
    """Run what is not done yet of a suite; tell whether every cell has its figures.

    Raises:  ConfigError when the folder holds results of another build.
             StoreError when results cannot be written.
    """
    session = _Session(asked, engines, told, clock)
    cells = asked.cells
    if tuning := baselines.tuning_cells(cells):
        found = await session.step(asked.suite + baselines.TUNING_SUFFIX, tuning, baselines.TUNING_SEEDS)
        cells = baselines.settled(cells, found)
    results = await session.step(asked.suite, cells, asked.seeds)
    wanted = {cell.id for cell in cells}
    return all(result.state != "failed" for result in results if result.cell.id in wanted)


class _Session:
    """What the steps of a run have in common."""

    def __init__(self, asked: Asked, engines: runner.Engines, told: Console, clock: Clock) -> None:
        self._asked, self._engines, self._told, self._clock = asked, engines, told, clock
        self._machine = this_machine()

    async def step(self, name: str, cells: Sequence[Cell], seeds: tuple[int, ...]) -> tuple[Result, ...]:
        """Run those of the cells that are not done; return all results there are."""
        stamp = Stamp(
            suite=name,
            machine=self._machine,
            command=shlex.join(["dynamo-poa", *sys.argv[1:]]),
            seeds=seeds,
            cells=len(cells),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            only=self._asked.only,
        )
        with Store.open(self._asked.folder, stamp, cells, fresh=self._asked.fresh) as store:
            for problem in store.contents.problems:
                self._say(f"{problem}; its cell is run again")
            results = {result.cell.id: result for result in store.contents.results}
            todo = [cell for cell in cells if cell.id not in store.contents.done]
            meter = Meter(todo, self._clock)
            if len(todo) < len(cells):
                self._say(f"{name}: {len(cells) - len(todo)} of {len(cells)} cells are done already")
            with Teller(self._told, name, meter) as teller:

                def keep(result: Result) -> None:
                    store.add(result)
                    results[result.cell.id] = result
                    teller.ended(result)

                file = f"{self._asked.suite}{baselines.TUNING_SUFFIX}.jsonl"
                for cell in todo:
                    if cell.policy == baselines.BEST:
                        keep(runner.failed(cell, UNSETTLED.format(file=file)))
                await runner.run([c for c in todo if c.policy != baselines.BEST], self._engines, keep)
            states = ", ".join(f"{count} {state}" for state, count in sorted(meter.states.items()))
            self._say(f"{name}: {states or 'nothing left to do'}; {store.path}")
        return tuple(results.values())

    def _say(self, text: str) -> None:
        self._told.print(text, soft_wrap=True)
