"""Which prompts have come of late and how many were in flight, second by second: what a split is judged on.

Owns: the window, what of a decision counts, at which instants it is counted what is in flight.
Does not own: what is made of it (split.py, closed_loop.py), which requests are in flight (flight.py).
Invariant: bounded by the window's seconds, whatever comes; a request counts once, also when it was tried on
           two workers or has two legs.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.values import Role
from dynamo_poa.wire import Chosen

Floats = NDArray[np.float64]
# Columns: requests; prompt tokens they had to compute where they were sent, and squared; all prompt tokens,
# and squared
REQUESTS, UNCACHED, UNCACHED_SQUARED, PROMPT, PROMPT_SQUARED = range(5)
_COLUMNS = 5


class PromptWindow:
    """The prompts of the last `window_s` seconds. Instants are monotonic, of receipt."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since: int | None = None  # the first second anything came in
        self._seconds: deque[tuple[int, list[float]]] = deque()  # those without a prompt are left out
        self._in_flight: deque[tuple[int, int]] = deque()  # seconds in which nothing was heard are left out

    def add(self, event: Chosen, at_s: float) -> None:
        """Take in a decision; those of decode legs and second tries are no new prompts."""
        if event.role is Role.DECODE or event.attempt > 1:
            return
        second = math.floor(at_s)
        if self._since is None:
            self._since = second
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0.0] * _COLUMNS))
        uncached = float(max(event.prompt_tokens - event.cached_tokens, 1))  # the last token always is
        sums = self._seconds[-1][1]
        sums[REQUESTS] += 1
        sums[UNCACHED] += uncached
        sums[UNCACHED_SQUARED] += uncached**2
        sums[PROMPT] += event.prompt_tokens
        sums[PROMPT_SQUARED] += float(event.prompt_tokens) ** 2

    def look(self, in_flight: Callable[[], int], at_s: float) -> None:
        """Count what is in flight, at the first instant of each second at which anything is heard."""
        second = math.floor(at_s)
        if not self._in_flight or self._in_flight[-1][0] < second:
            self._in_flight.append((second, in_flight()))

    def forget(self, at_s: float) -> None:
        """Let go of what is older than the window."""
        while self._seconds and self._seconds[0][0] < at_s - self._window_s:
            self._seconds.popleft()
        while self._in_flight and self._in_flight[0][0] < at_s - self._window_s:
            self._in_flight.popleft()

    def seconds(self, at_s: float) -> Floats:
        """Return the sums of each whole second of the window.

        The one that runs is left out, and so is the first in which anything came: it began before that.

        Returns:  `(n, 5)`, oldest first; no rows before the first prompt; zeros where none came.
        """
        now = math.floor(at_s)
        first = self._first(at_s)
        rows = np.zeros((max(now - first, 0), _COLUMNS))
        for second, sums in self._seconds:
            if first <= second < now:
                rows[second - first] = sums
        return rows

    def in_flight(self, at_s: float) -> Floats:
        """Return how many requests were in flight in each of those seconds; NaN where nothing was heard."""
        now, first = math.floor(at_s), self._first(at_s)
        counts = np.full(max(now - first, 0), np.nan)
        for second, count in self._in_flight:
            if first <= second < now:
                counts[second - first] = count
        return counts

    def _first(self, at_s: float) -> int:
        """Return the first second that counts; the one that runs where none does."""
        if self._since is None:
            return math.floor(at_s)
        return math.ceil(max(self._since + 1, at_s - self._window_s))
