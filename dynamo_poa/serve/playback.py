"""What a controller would have known at each instant of a recording, by the controller's own code.

Owns: the recording's own clock, when a snapshot is due on it, what is counted as not understood.
Does not own: the file format (recording.py), what is first read of it (survey.py), any judgement: those are
              the controller's own (decisions.py, fleet.py, latency.py, snapshot.py).
Invariant: the same recording gives the same instants; the machine's clock is not looked at, and what comes
           later in the file does not show in an instant, except who the workers are until it is announced.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dynamo_poa import wire
from dynamo_poa.config import ControllerConfig
from dynamo_poa.copies import Rank
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import RecordingError, WireError
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook
from dynamo_poa.load import WorkerState
from dynamo_poa.pricing import snapshots_at
from dynamo_poa.recording import Reader
from dynamo_poa.serve.survey import OURS, route_of, survey
from dynamo_poa.snapshot import Snapshot
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency

MAX_NAMED_SUBJECTS = 20  # of those we do not know; the rest of a foreign stream is one number
MAX_SUBJECT = 200  # characters shown of one

OnPass = Callable[[WorkerKey, WorkerCard, wire.ForwardPass, float], None]


class Instant(NamedTuple):
    """The requests in flight at an instant, in seconds since the first message, one snapshot a leg."""

    at_s: float
    snapshots: list[Snapshot]


def usual_log(
    block_size: int, prompts_window_s: float | None = None
) -> Callable[[frozenset[Role]], DecisionLog]:
    """Return what makes the log of a controller with default settings, for Playback's `make_log`."""
    config = ControllerConfig()
    return lambda answering: DecisionLog(
        window=config.window,
        ttft_window_s=config.regime.window_s,
        stale_s=config.stale_s,
        block_size=block_size,
        answering=answering,
        prompts_window_s=config.estimate_window_s if prompts_window_s is None else prompts_window_s,
    )


class Playback:
    """A recording, played once. Instants are seconds since its first message.

    at_s:       of the last message so far; never goes back
    messages:   taken in, by topic; `unknown` are subjects of neither Dynamo nor us
    latencies:  what is known of each worker's speed, as of the last instant; `workers` are those present
    """

    def __init__(
        self,
        path: Path,
        *,
        block_size: int,
        make_log: Callable[[frozenset[Role]], DecisionLog],
        also: Callable[[bytes, float], None] = lambda data, at_s: None,
        on_pass: OnPass = lambda key, card, done, at_s: None,
    ) -> None:
        """Read the recording for the first time.

        Args:    make_log: of the requests in flight, told which legs answer.
                 also: gets each message of decisions.  on_pass: gets each forward pass.
        Raises:  RecordingError when the file is not a recording.
        """
        config = ControllerConfig()
        self.at_s = 0.0
        self.reader = Reader(path)
        self.messages, self.unknown = Counter[str](), Counter[str]()
        self.latencies: dict[WorkerKey, WorkerLatency] = {}
        self.workers: list[WorkerState] = []
        self._path, self._also, self._notes = path, also, Counter[str]()
        self._estimate_s = config.estimate_s
        self._silent_looks = math.ceil(config.stale_s / config.estimate_s)
        self._book = LatencyBook(
            half_life_s=config.latency_half_life_s, straggler_factor=config.straggler_factor
        )
        found = survey(path, block_size)
        self.answering = found.answering
        self.log = make_log(found.answering)

        def passed(key: WorkerKey, card: WorkerCard, done: wire.ForwardPass, at_s: float) -> None:
            self._book.observe(key, card, done, at_s)
            on_pass(key, card, done, at_s)

        namespace, exposed = (*found.namespaces, "", "")[:2]
        self._fleet = Fleet(
            namespace, config.stale_s, exposed=exposed, on_pass=passed, on_restart=self._book.forget
        )
        self._fleet.set_cards(found.cards, 0.0)
        self._notes["workers inferred from forward passes, no cards recorded"] = (
            len(found.cards) if found.inferred else 0
        )

    @property
    def curves(self) -> dict[Role, Curve]:
        """Return each pool's speed, as of the last instant; a pool's stays when its workers have gone."""
        return self._book.pool_curves()

    def caches(self) -> list[Rank]:
        """Return each rank's cache as it is now."""
        return self._fleet.caches()

    @property
    def inexact(self) -> dict[str, int]:
        """Return what makes the figures so far less than exact, by what it is."""
        log = self.log
        counts = {**self._notes}
        counts |= {f"decisions refused: {reason}": count for reason, count in log.refused.items()}
        counts |= {f"metrics not used: {reason}": count for reason, count in self._fleet.dropped.items()}
        counts |= {
            "decision batches lost": log.lost,
            "decision events dropped by routers": log.dropped,
            "decisions without candidates": log.unrecorded,
            "decisions with impossible candidates": log.unpriced,
            "requests given up, too many open": log.forgotten,
            "forward passes without a duration": self._book.unmeasured,
        }
        return {name: count for name, count in counts.items() if count}

    def instants(self) -> Iterator[Instant]:
        """Play the recording and stop at each instant at which a controller would look; to be called once.

        Of a silence only the end is looked at from when everything known is stale.

        Raises:  RecordingError when nothing in it was of use.
        """
        first_at_s: float | None = None
        looks = 0
        for line in self.reader:
            first_at_s = line.at_s if first_at_s is None else first_at_s
            if line.at_s - first_at_s < self.at_s:
                self._notes["messages earlier than the one before"] += 1
            self.at_s = max(self.at_s, line.at_s - first_at_s)
            due = range(looks, int(self.at_s // self._estimate_s) + 1)
            for look in (*due[: self._silent_looks], *due[self._silent_looks :][-1:]):
                yield self._look(look * self._estimate_s)
            looks = max(looks, due.stop)
            self._take(line.subject, line.data)
        last = self._look(self.at_s)
        if self.at_s < self._estimate_s:  # too short for another look
            yield last
        if not self.log.batches and not self._fleet.received[wire.FORWARD_PASS_METRICS]:
            raise RecordingError(f"{self._path}: holds nothing to estimate from: {self._what_it_holds()}")

    def _look(self, at_s: float) -> Instant:
        self._fleet.take_notices(at_s)  # what they tell of is in `dropped`, too
        self.log.advance(at_s)
        self.workers = workers = self._fleet.workers(at_s)
        self.latencies = self._book.fit(at_s, [(worker.key, worker.card.role) for worker in workers])
        return Instant(at_s, snapshots_at(at_s, workers, self.latencies, self.log.running()))

    def _take(self, subject: str, data: bytes) -> None:
        route = route_of(subject)
        if route is None:
            name = ascii(subject[:MAX_SUBJECT])  # it may be anything, a terminal's commands included
            known = name in self.unknown or len(self.unknown) < MAX_NAMED_SUBJECTS
            self.unknown[name if known else "others"] += 1
            return
        self.messages[route.topic] += 1
        if route.topic == "decisions":
            self.log.receive(data, self.at_s)
            self._also(data, self.at_s)
        elif route.topic == "cards":
            try:
                self._fleet.set_cards(wire.decode_cards(data).cards, self.at_s)
            except WireError as error:
                self._notes[f"cards refused: {error.reason}"] += 1
        elif route.topic not in OURS:
            # Wall time serves a publisher's skew only.
            self._fleet.observe(subject, data, self.at_s, self.at_s)

    def _what_it_holds(self) -> str:
        counts = {**self.messages, "unknown subjects": self.unknown.total()}
        counts |= {f"skipped lines ({reason})": count for reason, count in self.reader.skipped.items()}
        counts |= self.inexact
        return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "no messages"
