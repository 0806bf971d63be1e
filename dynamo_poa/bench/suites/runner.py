"""In which order a suite's cells are run, and that one that goes wrong costs the others nothing.

Owns: the order (policies interleaved within a workload and seed), the simulator's processes, the life of live
      graphs, what a failure costs, the mark of a cell that was not run.
Does not own: how one cell is run (replayed.py, live.py), where results are kept (store.py), what is shown
              (command.py).
Invariant: every cell that is handed in ends in one result, kept at once; but for a run that is interrupted
           or whose disk is full, which keeps what was finished. Policies of one workload and seed are run
           side by side, in an order of chance, as far as their graphs have room at once.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from dynamo_poa.bench.suites import baselines
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result
from dynamo_poa.bench.suites.live_graphs import watches_of
from dynamo_poa.errors import PoaError

PROCESSES = 2
MOST_WATCHES = 120  # of discovery, by graphs that are up at once: most kernels allow a user 128
FAILURES_IN_A_ROW = 2  # of one policy's graph, which is then given up
POA_WINDOW_S = (
    10.0,
    20.0,
)  # bounds of what PoA-hat is computed over: the configuration's least; as in sweep.py

Keep = Callable[[Result], None]


class Block(Protocol):
    """A fleet's graphs, one a policy, while they are up."""

    async def run(self, cell: Cell) -> Result:
        """Run a cell; a graph that died gives a result that says so."""
        ...


class Engines(NamedTuple):
    """What runs cells.

    pool:      so many processes to run `replayed` in
    replayed:  a function that another process can import
    block:     serves a fleet under these policies; the last argument is PoA-hat's window
    """

    pool: Callable[[int], AbstractContextManager[Executor]]
    replayed: Callable[[Cell], Result]
    block: Callable[[Fleet, tuple[Policy, ...], float], AbstractAsyncContextManager[Block]]


def ordered(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return cells as they are to be run.

    By fleet, for its graphs are started once; then by seed, so that a run that is cut short has whole ones;
    then by workload. Policies within: shuffled, differently for each seed and workload, always the same way.
    """
    fleets: dict[Fleet, dict[int, dict[str, list[Cell]]]] = {}
    for cell in cells:
        fleets.setdefault(cell.fleet, {}).setdefault(cell.seed, {}).setdefault(cell.group, []).append(cell)
    result: list[Cell] = []
    for seeds in fleets.values():
        for seed, groups in sorted(seeds.items()):
            for group, members in groups.items():
                members.sort(key=lambda cell: cell.policy.name)
                random.Random(f"{seed} {group}").shuffle(members)
                result += members
    return tuple(result)


async def run(cells: Iterable[Cell], engines: Engines, keep: Keep) -> None:
    """Run cells: first all that are replayed, then the live ones, fleet by fleet.

    Args:     keep: gets each result as soon as it is there; what it raises ends the run.
    """
    todo = ordered(cells)
    await _replay([cell for cell in todo if cell.engine == "replay"], engines, keep)
    for of_block in blocks(cell for cell in todo if cell.engine == "live"):
        await _live(of_block, engines, keep)


def blocks(cells: Iterable[Cell]) -> tuple[tuple[Cell, ...], ...]:
    """Return live cells by the graphs that are up together, in their order.

    One fleet, and one policy of a name: where the best setting is another for another workload, that workload
    gets graphs of its own. Graphs that find no room beside the others are up after them.
    """
    found: list[tuple[Fleet, dict[str, Policy], list[Cell]]] = []
    groups: dict[tuple[Fleet, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.fleet, cell.group), []).append(cell)
    for (fleet, _), members in groups.items():
        policies = {cell.policy.name: cell.policy for cell in members}
        for other, theirs, block in found:
            if other == fleet and all(theirs.get(name, own) == own for name, own in policies.items()):
                theirs |= policies
                block += members
                break
        else:
            found.append((fleet, policies, members))
    return tuple(ordered(part) for _, _, block in found for part in _with_room(block))


def _with_room(block: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Split a block by its policies until each part's graphs may be up at once.

    The default and our policies go first, the latest before the others: it is they that are compared.
    """
    parts: list[set[Policy]] = []
    for policy in sorted({cell.policy for cell in block}, key=_precedence):
        for part in parts:
            if sum(watches_of(block[0].fleet, one) for one in {*part, policy}) <= MOST_WATCHES:
                part.add(policy)
                break
        else:
            parts.append({policy})
    for part in parts:
        yield [cell for cell in block if cell.policy in part]


def _precedence(policy: Policy) -> tuple[bool, int, str]:
    names = [known.name for known in baselines.LIVE]
    known = names.index(policy.name) if policy.name in names else -1
    return policy != baselines.DEFAULT, -known, policy.name


def failed(cell: Cell, reason: str) -> Result:
    """Return the mark of a cell that has no figures."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Result(cell=cell, state="failed", reason=reason, at=now)


async def _replay(cells: Sequence[Cell], engines: Engines, keep: Keep) -> None:
    """Replay cells, several at a time.

    When a process of the simulator dies, the cells that were under way are tried again one by one: the one
    that kills its process once more has failed.
    """
    for cell in await _through_pool(cells, PROCESSES, engines, keep):
        if await _through_pool([cell], 1, engines, keep):
            keep(failed(cell, "the simulator's process died"))


async def _through_pool(cells: Sequence[Cell], width: int, engines: Engines, keep: Keep) -> list[Cell]:
    """Replay cells and return those that were under way when a process died."""
    left, lost = deque(cells), list[Cell]()
    while left:
        with engines.pool(width) as pool:
            running: dict[asyncio.Future[Result], Cell] = {}
            whole = True
            while running or (left and whole):
                while left and whole and len(running) < width:
                    try:
                        job = pool.submit(_guarded, engines.replayed, left[0])
                    except BrokenProcessPool:  # before anybody has seen how its job ended
                        whole = False
                        if not running:  # a pool that cannot even begin must not be tried for ever
                            lost.append(left.popleft())
                        break
                    running[asyncio.wrap_future(job)] = left.popleft()
                if not running:
                    break
                try:
                    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    for job_left in running:  # how they end, or die of the same signal, is no longer asked
                        job_left.cancel()
                    raise
                for job_ended in ended:
                    cell = running.pop(job_ended)
                    try:
                        result = job_ended.result()
                    except BrokenProcessPool:
                        whole = False
                        lost.append(cell)
                    else:
                        keep(result)
    return lost


def _guarded(replayed: Callable[[Cell], Result], cell: Cell) -> Result:
    """Run a cell in the simulator's process, where errors are turned to results: not all can be sent back."""
    try:
        return replayed(cell)
    except (PoaError, OSError) as error:
        return failed(cell, str(error))


async def _live(cells: Sequence[Cell], engines: Engines, keep: Keep) -> None:
    """Run the cells of one block while its graphs are up."""
    policies = tuple(dict.fromkeys(cell.policy for cell in cells))
    shortest_s = min(min((phase.seconds for phase in cell.phases), default=cell.seconds) for cell in cells)
    low_s, high_s = POA_WINDOW_S
    async with AsyncExitStack() as stack:
        try:
            serving = engines.block(cells[0].fleet, policies, min(max(shortest_s, low_s), high_s))
            block = await stack.enter_async_context(serving)
        except (PoaError, OSError) as error:
            for cell in cells:
                keep(failed(cell, f"not run: its graphs did not start: {error}"))
            return
        given_up = _GivenUp()
        for cell in cells:
            if why := given_up.why(cell.policy):
                keep(failed(cell, why))
                continue
            try:
                result = await block.run(cell)
            except (PoaError, OSError) as error:
                result = failed(cell, str(error))
            given_up.count(result)
            keep(result)


class _GivenUp:
    """Which graphs no more cells are spent on: it would take as long as to measure, and tell nothing."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[str]] = {}

    def count(self, result: Result) -> None:
        """Note how a cell ended; one that has figures clears its graph."""
        reasons = self._reasons.setdefault(result.cell.policy.name, [])
        if result.state == "failed":
            reasons.append(result.reason)
        else:
            reasons.clear()

    def why(self, policy: Policy) -> str:
        """Return why a policy's graph is given up; nothing while it is not."""
        reasons = self._reasons.get(policy.name, [])
        if len(reasons) < FAILURES_IN_A_ROW:
            return ""
        return f"not run: its graph failed {len(reasons)} times in a row, the last time: {reasons[-1]}"
