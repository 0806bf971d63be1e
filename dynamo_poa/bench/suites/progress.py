"""How far a run is, and how long it still takes.

Owns: the time left, the lines and the bar that tell it.
Does not own: how long a cell should take (catalogue.py).
Invariant: what is told changes nothing; where output is no terminal there is one line a cell and no bar.
"""

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dynamo_poa.bench.suites.catalogue import seconds_of, step_s
from dynamo_poa.bench.suites.cells import Cell, Result
from dynamo_poa.clock import Clock

SHOWN = ("ttft_mean_s", "ttft_p99_s", "throughput_rps")


class Meter:
    """Counts cells and works out the time left.

    left = estimate of what is left * elapsed / estimate of what is finished, at first the estimate alone
    """

    def __init__(self, cells: Sequence[Cell], clock: Clock) -> None:
        self.states: Counter[str] = Counter()
        self.total = len(cells)
        self._clock, self._started_s = clock, clock.monotonic_s()
        self._all_s = step_s(cells)
        self._overhead = self._all_s / (sum(map(seconds_of, cells)) or 1.0)  # graphs' starts, over all cells
        self._finished_s = 0.0

    def count(self, result: Result) -> None:
        """Note that a cell has ended."""
        self.states[result.state] += 1
        self._finished_s += seconds_of(result.cell) * self._overhead

    @property
    def finished(self) -> int:
        """Return how many cells have ended."""
        return self.states.total()

    @property
    def finished_frac(self) -> float:
        """Return the share of the whole that is over, in time."""
        return self._finished_s / self._all_s if self._all_s else 1.0

    @property
    def left_s(self) -> float:
        """Return about how long the rest takes."""
        left_s = max(self._all_s - self._finished_s, 0.0)
        if not self._finished_s:
            return left_s
        return left_s * (self._clock.monotonic_s() - self._started_s) / self._finished_s


class Teller:
    """Tells a person of cells as they end: a bar on a terminal, lines elsewhere; what went wrong on both."""

    def __init__(self, console: Console, title: str, meter: Meter) -> None:
        self._console, self._title, self._meter = console, title, meter
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        """Show the bar, where there can be one."""
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self._text(), total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it was last."""
        if self._bar is not None:
            self._bar.stop()

    def ended(self, result: Result) -> None:
        """Tell of a cell."""
        self._meter.count(result)
        if self._bar is None or result.state != "done":
            self._console.print(f"{self._text()}: {line(result)}", soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, description=self._text(), completed=self._meter.finished_frac)

    def _text(self) -> str:
        return (
            f"{self._title} {self._meter.finished}/{self._meter.total}, {duration(self._meter.left_s)} left"
        )


def line(result: Result) -> str:
    """Return a result in one line."""
    cell = result.cell
    what = f"{cell.engine}, {cell.group}, {cell.policy.name}, seed {cell.seed}"
    figures = ", ".join(f"{key} {result.figures[key]:.3g}" for key in SHOWN if key in result.figures)
    if result.state != "done":
        figures = f"{result.state.upper()}: {'; '.join(result.reason.splitlines())}"
    return f"{what}: {figures}"


def duration(seconds: float) -> str:
    """Return a duration for a person: `40 s`, `12 min`, `1 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
