"""Which of many like lines are written to the log: one a second, with the number of those that were not.

Owns: the pace, by event.
Does not own: what is said.
Source: an outage must not become a flood of lines.
"""

from collections import Counter
from typing import Any

import structlog

from dynamo_poa.clock import Clock

log = structlog.get_logger(__name__)

PAUSE_S = 1.0


class Complaints:
    """Says each event once a second at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at_s: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def say(self, event: str, **facts: Any) -> None:
        """Write a warning, or count it for the next; `more` tells how many there were in between."""
        now_s = self._clock.monotonic_s()
        if now_s - self._said_at_s.get(event, float("-inf")) < PAUSE_S:
            self._unsaid[event] += 1
            return
        log.warning(event, **facts, more=self._unsaid.pop(event, 0))
        self._said_at_s[event] = now_s
