"""Which workers are not sent to for now.

Owns: workers that refused a connection, for `avoid_s`.
Does not own: who is alive (Dynamo's discovery; KvRouter stops offering what it drops).
Invariant: forgets by itself: holds no more than the workers of the last `avoid_s`.
Source: measured: KvRouter has no exclusion and keeps choosing a dead worker for the 7-9 s until discovery
        drops it, more often than others, since failed requests free their load.
"""

from dynamo_poa.clock import Clock


class AvoidList:
    """Worker ids with an end."""

    def __init__(self, avoid_s: float, clock: Clock) -> None:
        self._avoid_s, self._clock = avoid_s, clock
        self._until_s: dict[int, float] = {}

    def add(self, worker_id: int) -> None:
        """Avoid a worker from now on."""
        now_s = self._clock.monotonic_s()
        self._until_s = {worker: until_s for worker, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[worker_id] = now_s + self._avoid_s

    def any(self) -> bool:
        """Tell whether any worker may be avoided now."""
        if not self._until_s:
            return False
        now_s = self._clock.monotonic_s()
        return any(until_s > now_s for until_s in self._until_s.values())

    def __contains__(self, worker_id: int) -> bool:
        """Tell whether a worker is avoided now."""
        until_s = self._until_s.get(worker_id)
        return until_s is not None and until_s > self._clock.monotonic_s()
