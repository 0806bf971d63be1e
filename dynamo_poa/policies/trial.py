"""Which of two settings is asked for next while they are compared, and when the comparison is over.

Owns: the time slots of a trial, in the order A B B A of the setting in force and the candidate; which
      requests count for which slot; ending a trial early.
Does not own: the statistics (judge.py), which candidates are tried and what follows (auto.py).
Invariant: pure. A slot begins when its setting is in force, not when it was asked for; requests decided at
           its start still meet what the slot before has queued and are not judged. All slots are waited for
           equally long, so that requests without an end are missing from both arms alike.
Source: issue 6; time slots, because requests of concurrent arms share queues.
"""

import msgspec

from dynamo_poa.config import PolicyConfig
from dynamo_poa.policies.judge import (
    STARVED_FRAC,
    Change,
    Tally,
    Verdict,
    change,
    is_far_worse,
    verdict,
)
from dynamo_poa.policies.protocol import View
from dynamo_poa.values import Setting

LATE_SLOTS = 2  # a slot's requests are waited for so many slots after it
START_S = 5.0  # a setting that is not in force so long after it was asked for was overruled
MAX_VOID_PAIRS = 3
MIN_FAILURES = 3  # of the candidate; fewer may be chance ...
FAILURE_FACTOR = 2.0  # ... and so many times as many as under the setting in force


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's turn.

    revisions:        of the records that have put its setting in force: a change of regime makes another
    arrived_before:   requests since the controller's start when judging began; None before, or unknown
    arrived:          of those judged; 0 while unknown
    early, all:       requests that had ended by the slot's own end, and by the time it is judged
    failed:           requests that ended badly
    """

    candidate: bool
    revisions: tuple[int, ...]
    from_s: float
    until_s: float
    arrived_before: int | None = None
    arrived: int = 0
    early: Tally = Tally()
    all: Tally = Tally()
    failed: int = 0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Two settings under comparison.

    asked_at_s:  since when the next slot's setting has been asked for; None while a slot runs
    slots:       those begun
    changes:     of the pairs judged
    """

    base: Setting
    candidate: Setting
    asked_at_s: float | None
    slots: tuple[Slot, ...] = ()
    changes: tuple[Change, ...] = ()
    judged_pairs: int = 0

    @property
    def setting(self) -> Setting:
        """Return what should be in force now."""
        number = len(self.slots) - (self.asked_at_s is None)
        return self.candidate if _is_candidates(number) else self.base


def begin(base: Setting, candidate: Setting, at_s: float) -> Trial:
    """Return a trial that waits for its first slot, which is the setting's in force."""
    return Trial(base=base, candidate=candidate, asked_at_s=at_s)


def advance(trial: Trial, view: View, config: PolicyConfig) -> tuple[Trial, Verdict | None]:
    """Take in a view; return the trial and, when it is over, what came of it.

    Bad news counts at once: failures, an operator, a slot that is far worse than the one before it.
    """
    trial = _followed(trial, view)
    trial = msgspec.structs.replace(
        trial, slots=tuple(_with_outcomes(slot, view, config) for slot in trial.slots)
    )
    if _fails(trial):
        return trial, Verdict.FAILED
    total_slots = 2 * config.max_pairs
    if trial.asked_at_s is None:
        slot = trial.slots[-1]
        if view.in_force != trial.setting:
            return trial, Verdict.INTERRUPTED
        if view.at_s >= slot.until_s:
            if slot.candidate and _harms(trial.slots, config):
                return trial, Verdict.WORSE
            trial = msgspec.structs.replace(trial, asked_at_s=view.at_s)
    asked_at_s = trial.asked_at_s
    if asked_at_s is not None and len(trial.slots) < total_slots:
        if view.in_force == trial.setting:  # one that goes on is in force already
            slot = Slot(
                candidate=_is_candidates(len(trial.slots)),
                revisions=(view.revision,),
                from_s=view.at_s + config.settle_s,
                until_s=view.at_s + config.slot_s,
            )
            trial = msgspec.structs.replace(trial, slots=(*trial.slots, slot), asked_at_s=None)
        elif not 0 <= view.at_s - asked_at_s < START_S:
            return trial, Verdict.INTERRUPTED
    return _judged(trial, view, config)


def _is_candidates(number: int) -> bool:
    return number % 4 in (1, 2)


def _followed(trial: Trial, view: View) -> Trial:
    """Take in that the running slot's setting is in force under another revision.

    Source:  controller.py: a record carries the regime, so a change of regime makes a new one of the same
             setting. Its requests would be missing, and look as if they did not end.
    """
    if trial.asked_at_s is not None or view.in_force != trial.setting:
        return trial
    slot = trial.slots[-1]
    if view.revision in slot.revisions:
        return trial
    slot = msgspec.structs.replace(slot, revisions=(*slot.revisions, view.revision))
    return msgspec.structs.replace(trial, slots=(*trial.slots[:-1], slot))


def _with_outcomes(slot: Slot, view: View, config: PolicyConfig) -> Slot:
    """Count the requests that were decided within the slot, under a revision of its own."""
    if view.at_s < slot.from_s or view.at_s > slot.until_s + LATE_SLOTS * config.slot_s:
        return slot
    ours = [
        outcome
        for outcome in view.outcomes
        if outcome.revision in slot.revisions and slot.from_s <= outcome.decided_at_s < slot.until_s
    ]
    well = [outcome for outcome in ours if not outcome.failed]
    everyone = slot.all.with_requests(well)
    slot = msgspec.structs.replace(slot, all=everyone, failed=slot.failed + len(ours) - len(well))
    if view.at_s > slot.until_s:
        return slot
    arrived, before = view.traffic.arrived, slot.arrived_before
    if arrived is None:
        return msgspec.structs.replace(slot, early=everyone)
    before = arrived if before is None else before
    return msgspec.structs.replace(slot, early=everyone, arrived_before=before, arrived=arrived - before)


def _fails(trial: Trial) -> bool:
    """Tell whether requests fail under the candidate as they do not otherwise."""
    failed = [0, 0]
    for slot in trial.slots:
        failed[slot.candidate] += slot.failed
    return failed[True] >= MIN_FAILURES and failed[True] > FAILURE_FACTOR * failed[False]


def _harms(slots: tuple[Slot, ...], config: PolicyConfig) -> bool:
    """Tell whether the candidate's slot that just ended is enough to give it up.

    Requests that do not end are the worst of all and the last to be seen: of those that arrived the share
    that ended is compared, too.
    """
    slot = slots[-1]
    base = next(before for before in reversed(slots) if not before.candidate)
    if min(base.arrived, slot.arrived) >= config.min_requests and base.early.count >= config.min_requests:
        share = base.early.count / base.arrived
        if slot.early.count < STARVED_FRAC * share * slot.arrived:
            return True
    return is_far_worse(base.early, slot.early, config.min_requests)


def _judged(trial: Trial, view: View, config: PolicyConfig) -> tuple[Trial, Verdict | None]:
    """Judge the pair whose requests have been waited for, if there is one."""
    pair = trial.slots[2 * trial.judged_pairs : 2 * trial.judged_pairs + 2]
    if len(pair) < 2 or view.at_s < pair[1].until_s + LATE_SLOTS * config.slot_s:
        return trial, None
    base, candidate = sorted(pair, key=lambda slot: slot.candidate)
    changes, judged = trial.changes, trial.judged_pairs + 1
    if min(base.all.count, candidate.all.count) >= config.min_requests:
        changes = (*changes, change(base.all, candidate.all))
    trial = msgspec.structs.replace(trial, changes=changes, judged_pairs=judged)
    if len(changes) == judged - MAX_VOID_PAIRS:
        return trial, Verdict.TOO_LITTLE
    if is_far_worse(base.all, candidate.all, config.min_requests):
        return trial, Verdict.WORSE
    found = verdict(changes, config.max_pairs)
    if found is None and judged >= config.max_pairs:
        found = Verdict.UNDECIDED if changes else Verdict.TOO_LITTLE
    return trial, found
