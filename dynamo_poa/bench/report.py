"""How figures are reported: values beside their goals, the machine they were taken on, one table.

Owns: the records `--json` writes, when a goal counts as reached, the closing table, the build stamp.
Does not own: any measurement.
Invariant: a disappointing value is reported like a good one; what could not be measured has no value at all.
"""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from dynamo_poa.errors import PoaError
from dynamo_poa.serve.plan import nats_server

PACKAGES = ("dynamo-poa", "ai-dynamo", "nats-py", "uvloop", "msgspec", "numpy", "scipy")


class MeasurementError(PoaError):
    """Go on with the next figure: this one could not be measured, or what was measured says nothing."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One value. `reached` is None where there is no goal."""

    key: str
    what: str
    value: float
    unit: str
    goal: str = ""
    reached: bool | None = None

    @property
    def text(self) -> str:
        """Return value and unit for a person."""
        value = self.value
        digits = 0 if float(value).is_integer() or abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
        if 0 < abs(value) < 0.1:
            digits = 4
        return f"{value:,.{digits}f} {self.unit}".rstrip()


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: its values and what a reader must know of how they came about."""

    name: str
    title: str
    measures: tuple[Measure, ...]
    conditions: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Tell whether every goal was reached."""
        return all(measure.reached is not False for measure in self.measures)

    def __getitem__(self, key: str) -> float:
        """Return one value by its key."""
        return next(measure.value for measure in self.measures if measure.key == key)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures were taken, and with what."""

    processor: str
    cores: int
    system: str
    python: str
    nats_server: str
    packages: dict[str, str]
    commit: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. `failed` names the figures that could not be measured, and why."""

    machine: Machine
    figures: tuple[Figure, ...]
    failed: dict[str, str]
    seconds: float


def plain(key: str, what: str, value: float, unit: str) -> Measure:
    """Return a value without a goal."""
    return Measure(key=key, what=what, value=value, unit=unit)


def at_most(key: str, what: str, value: float, unit: str, high: float) -> Measure:
    """Return a value that should not exceed `high`."""
    goal = f"<= {high:,g} {unit}".rstrip()
    return Measure(key=key, what=what, value=value, unit=unit, goal=goal, reached=value <= high)


def at_least(key: str, what: str, value: float, unit: str, low: float) -> Measure:
    """Return a value that should not fall below `low`."""
    goal = f">= {low:,g} {unit}".rstrip()
    return Measure(key=key, what=what, value=value, unit=unit, goal=goal, reached=value >= low)


def table(figures: tuple[Figure, ...], failed: dict[str, str]) -> Table:
    """Return the closing table, one row per value."""
    result = Table()
    for name in ("figure", "what", "measured", "goal", "reached"):
        result.add_column(name, justify="right" if name == "measured" else "left")
    for figure in figures:
        for number, measure in enumerate(figure.measures):
            reached = {None: "", True: "yes", False: "NO"}[measure.reached]
            last = number == len(figure.measures) - 1
            result.add_row(
                "" if number else figure.name,
                Text(measure.what),  # may hold brackets, which are not markup
                measure.text,
                measure.goal,
                reached,
                end_section=last,
            )
    for name, why in failed.items():
        result.add_row(name, Text(why), "not measured", "", "", end_section=True)
    return result


def this_machine() -> Machine:
    """Ask the machine what it is."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        nats_server=_answer(nats_server() or "nats-server", "--version"),
        packages={name: version(name) for name in PACKAGES},
        commit=commit_of(Path(__file__).parents[2]),
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit_of(folder: Path) -> str:
    """Return the checkout's commit; where files differ from it, with what their difference comes to.

    Returns:  `0123456789ab`, `0123456789ab+changes.89abcdef`; empty outside a checkout.
    """
    git = ("git", "-C", str(folder))
    commit = _answer(*git, "rev-parse", "--short=12", "HEAD")
    changed = commit and _answer(*git, "status", "--porcelain", "--untracked-files=no")
    if not changed:
        return commit
    difference = _answer(*git, "diff", "HEAD").encode()
    return f"{commit}+changes.{hashlib.sha256(difference).hexdigest()[:8]}"


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
