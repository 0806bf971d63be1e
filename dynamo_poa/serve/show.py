"""How figures, instants and durations are written for a person, and how a person writes a duration.

Owns: what stands in place of an unknown figure; units; tables of figures; the consoles commands print to.
Does not own: what is shown (watch.py, replay.py).
Invariant: unknown is shown as `-`, never as 0.
"""

import re
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from dynamo_poa.errors import ConfigError

UNKNOWN = "-"
MAX_DURATION_S = 30 * 86_400.0  # the controller pins for no longer
PIPE_WIDTH = 160  # columns, where no terminal says how many there are
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with so many digits after the point."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def seconds(value_s: float | None) -> str:
    """Return a duration to the millisecond."""
    return UNKNOWN if value_s is None else f"{value_s:.3f} s"


def percent(frac: float | None) -> str:
    """Return a share."""
    return UNKNOWN if frac is None else f"{frac:.1%}"


def count(value: int | None) -> str:
    """Return a whole number."""
    return UNKNOWN if value is None else str(value)


def counts(values: dict[str, int]) -> str:
    """Return named counts, in their order."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def read_duration_s(option: str, text: str) -> float:
    """Return the seconds in a duration such as 500ms, 60s, 5m or 1h.

    Raises:  ConfigError naming the option, the value and the bound.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text, re.ASCII)
    duration_s = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < duration_s <= MAX_DURATION_S:
        bound = f"a number with ms, s, m or h, such as 60s, > 0 and <= {MAX_DURATION_S / 3600:g}h"
        raise ConfigError([f"{option} = {text!r}: must be {bound}"])
    return duration_s


def read_instant_s(option: str, text: str) -> float:
    """Return the seconds in an instant such as 12.5 or 12.5s.

    Raises:  ConfigError naming the option, the value and the bound.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s?", text, re.ASCII)
    if match is None:
        raise ConfigError([f"{option} = {text!r}: must be a number of seconds >= 0, such as 12.5"])
    return float(match[1])


def figures_table(name: str, *figures: str) -> Table:
    """Return an empty table: a column of names, then columns of figures."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(name)
    for title in figures:
        table.add_column(title, justify="right")
    return table


def console(stream: TextIO = sys.stdout) -> Console:
    """Return a console on the stream; text in it is data, never markup."""
    return Console(
        file=stream, width=None if stream.isatty() else PIPE_WIDTH, markup=False, highlight=False, emoji=False
    )
