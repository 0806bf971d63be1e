"""Decides how the output of many processes becomes one readable stream.

Owns: the prefix, its width and colour.
Does not own: where lines come from.
Invariant: one line of output is one line here; a reader that has gone away stops the printing, not the graph.
"""

from collections.abc import Sequence
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Console:
    """Prints lines as `name | line`, each name in a colour of its own on a terminal."""

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        self._stream: TextIO | None = stream
        self._width = max(map(len, names), default=0)
        self._colours = dict(zip(names, _cycle(len(names)), strict=True)) if stream.isatty() else {}

    def line(self, name: str, text: str) -> None:
        """Print one line of a process."""
        prefix = f"{name:<{self._width}} |"
        if name in self._colours:
            prefix = f"\x1b[{self._colours[name]}m{prefix}\x1b[0m"
        if self._stream is None:
            return
        try:
            self._stream.write(f"{prefix} {text}\n")
            self._stream.flush()
        except BrokenPipeError:
            self._stream = None


def _cycle(count: int) -> list[int]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]
