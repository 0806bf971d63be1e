"""What the caching game and the split of workers were at an instant of a recording.

Owns: when a controller would have looked at either, on the recording's own clock.
Does not own: the games (placement.py, split.py), playing the recording (playback.py).
Invariant: what comes after the instant that is asked about does not show.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from dynamo_poa.config import ControllerConfig
from dynamo_poa.copies import Rank
from dynamo_poa.coupling import AllocationEstimate, CachingEstimate
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.load import WorkerState
from dynamo_poa.output_tokens import OutputTokens, decoded_requests
from dynamo_poa.placement import Placements
from dynamo_poa.split import note_split
from dynamo_poa.values import Curve, Role, WorkerKey, WorkerLatency


class Played(Protocol):
    """What is needed of playback.Playback."""

    log: DecisionLog
    workers: list[WorkerState]
    latencies: dict[WorkerKey, WorkerLatency]

    @property
    def curves(self) -> dict[Role, Curve]:
        """Return each pool's speed."""
        ...

    def caches(self) -> Iterable[Rank]:
        """Return each rank's cache."""
        ...


class SlowGamesPlayed:
    """Looks as a controller with default settings would; what it saw last is priced when asked for.

    Args:  until_s: the instant asked about: looks too old for its window are spared.
    """

    def __init__(self, playback: Played, output_tokens: OutputTokens, until_s: float) -> None:
        self.caching = CachingEstimate(reason="not priced yet")
        self._config = ControllerConfig()
        self._playback, self._output_tokens, self._until_s = playback, output_tokens, until_s
        self._placements = Placements(
            self._config.caching,
            caches=playback.caches,
            groups=playback.log.demand.groups,
            latencies=lambda: playback.latencies,
        )
        self._next_at_s = 0.0
        self._allocation: Callable[[], AllocationEstimate] = lambda: AllocationEstimate(
            reason="not priced yet"
        )

    def look(self, at_s: float) -> None:
        """Look at both games, at an instant the playback has stopped at."""
        playback, config = self._playback, self._config
        self._output_tokens.update(at_s, decoded_requests(playback.log.outcomes))
        self._allocation = note_split(
            at_s,
            playback.workers,
            playback.log,
            playback.curves,
            self._output_tokens.mean,
            config.slo,
            self._output_tokens.contexts,
        )
        if at_s >= self._next_at_s and at_s > self._until_s - config.caching.demand_window_s:
            self.caching = self._placements.note_caches(at_s)()
            self._next_at_s = at_s + config.games_s

    def allocation(self) -> AllocationEstimate:
        """Return the split of workers, priced as it was last seen."""
        return self._allocation()
