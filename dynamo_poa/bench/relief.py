"""Whether a slow worker was found, and what it was given before and after something could be done about it.

Owns: which decode worker the controller called slow first, its share of the picks by who selected.
Does not own: phases and their other figures (story.py), what is done about it (the policy).
Invariant: pure; which worker is slow is the controller's word, not ours.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Role, Selection
from dynamo_poa.wire import Chosen, DecisionBatch

RELIEVED_FRAC = 0.5  # of a fair share of the picks: at most so much goes to a worker that is relieved
RECENT_PICKS = 100


class SlowWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker that the controller found slow, and what it was given.

    factor:        its time over that of its pool's median worker
    found_after_s: from the load's beginning
    fair_share:    one worker's part of the pool
    share_before, share_after: of the decode picks, in the phases in which Dynamo selected, and in which the
                   plugin did, by marginal cost; None where there was no such phase
    """

    worker_id: str
    factor: float
    found_after_s: float
    fair_share: float
    share_before: float | None
    share_after: float | None

    @property
    def relieved(self) -> bool:
        """Tell whether it was given clearly less than a fair share once that could be helped."""
        return self.share_after is not None and self.share_after <= RELIEVED_FRAC * self.fair_share


class ReliefWatch:
    """Follows the decode picks, phase by phase, and the controller's word of slow workers."""

    def __init__(self) -> None:
        self._picks: list[Counter[int]] = []  # by worker, a phase each
        self._recent: deque[int] = deque(maxlen=RECENT_PICKS)
        self._found: tuple[int, float, float] | None = None  # worker, factor, after so long
        self._first_at_s: float | None = None
        self._workers = 0
        self._relieved = False

    def begin(self) -> None:
        """Start a phase."""
        self._picks.append(Counter())

    def on_batch(self, batch: DecisionBatch) -> None:
        """Take a router's decisions; those before the first phase are of no load of ours."""
        for event in batch.events:
            if isinstance(event, Chosen) and event.role is Role.DECODE and self._picks:
                self._picks[-1][event.worker_id] += 1
                self._recent.append(event.worker_id)

    def on_telemetry(self, record: TelemetryRecord) -> list[str]:
        """Take one tick; return what is new of the slow worker."""
        if not self._picks:
            return []
        if self._first_at_s is None:
            self._first_at_s = record.at_s
        if pool := record.pools.get(Role.DECODE):
            self._workers = pool.workers
        if self._found is None:
            return self._look(record, record.at_s - self._first_at_s)
        given, fair = self._recent.count(self._found[0]), RECENT_PICKS / max(self._workers, 1)
        helped = record.selection is Selection.MARGINAL and len(self._recent) == RECENT_PICKS
        if self._relieved or not helped or given > RELIEVED_FRAC * fair:
            return []
        self._relieved = True
        return [
            f"relief  it had {given} of the last {RECENT_PICKS} decode picks; {fair:.0f} were a fair share"
        ]

    def _look(self, record: TelemetryRecord, after_s: float) -> list[str]:
        slow = [(w.factor, w.key.worker_id) for w in record.stragglers if w.role is Role.DECODE and w.factor]
        if not slow:
            return []
        factor, worker_id = max(slow)
        self._found = worker_id, factor, after_s
        return [f"slow    decode worker {worker_id} takes {factor:.1f} times as long as its pool's median"]

    def share(self, phase: int) -> float | None:
        """Return the slow worker's share of a phase's picks; None where there is no such worker, or none."""
        return None if self._found is None else _share(self._picks[phase], self._found[0])

    def slow_worker(self, selections: Iterable[Selection | None]) -> SlowWorker | None:
        """Sum up; None where none was found.

        Args:  selections: who selected at the end of each phase.
        """
        if self._found is None or not self._workers:
            return None
        worker_id, factor, found_after_s = self._found
        by_selection: dict[Selection | None, Counter[int]] = {}
        for selection, picks in zip(selections, self._picks, strict=True):
            by_selection.setdefault(selection, Counter()).update(picks)
        return SlowWorker(
            worker_id=str(worker_id),
            factor=factor,
            found_after_s=found_after_s,
            fair_share=1 / self._workers,
            share_before=_share(by_selection.get(Selection.KV, Counter()), worker_id),
            share_after=_share(by_selection.get(Selection.MARGINAL, Counter()), worker_id),
        )


def _share(picks: Counter[int], worker_id: int) -> float | None:
    return picks[worker_id] / picks.total() if picks else None
