"""Which prompts have come of late, second by second: the mix that a split of workers is judged on.

Owns: the window, what of a decision counts.
Does not own: what is made of it (split.py).
Invariant: bounded by the window's seconds, whatever comes; a request counts once, also when it was tried on
           two workers or has two legs.
"""

import math
from collections import deque

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

    def forget(self, at_s: float) -> None:
        """Let go of what is older than the window."""
        while self._seconds and self._seconds[0][0] < at_s - self._window_s:
            self._seconds.popleft()

    def seconds(self, at_s: float) -> Floats:
        """Return the sums of each whole second of the window; the one that runs is left out.

        Returns:  `(n, 5)`, oldest first; no rows before the first prompt; zeros where none came.
        """
        now = math.floor(at_s)
        if self._since is None:
            return np.zeros((0, _COLUMNS))
        first = math.ceil(max(self._since, at_s - self._window_s))
        rows = np.zeros((max(now - first, 0), _COLUMNS))
        for second, sums in self._seconds:
            if first <= second < now:
                rows[second - first] = sums
        return rows
