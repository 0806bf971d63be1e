"""One trial: its slots, which requests count, what ends it."""

import msgspec
import pytest
from policy_world import STATIC, TAU, World, noisy, only

from dynamo_poa.config import PolicyConfig
from dynamo_poa.decisions import Traffic
from dynamo_poa.policies.auto import AutoPolicy
from dynamo_poa.policies.judge import Verdict
from dynamo_poa.policies.protocol import View
from dynamo_poa.policies.trial import advance, begin
from dynamo_poa.values import Regime, RequestOutcome

CONFIG = PolicyConfig(name="auto")


class Bench:
    """A trial, one view after another; what it asks for is in force from the next view on."""

    def __init__(self, config=CONFIG):
        self.config, self.at_s, self.revision = config, 100.0, 1
        self.in_force = STATIC
        self.trial = begin(STATIC, TAU, self.at_s)
        self.arrived = 0
        self.verdict = None

    def view(self, *outcomes, arrived=0, in_force=None):
        """Show the next view, a quarter of a second later."""
        self.arrived += arrived
        if in_force is None and self.trial.setting != self.in_force:
            self.in_force = self.trial.setting
            self.revision += 1
        view = View(
            at_s=self.at_s,
            regime=Regime.BELOW,
            static=STATIC,
            in_force=in_force or self.in_force,
            revision=self.revision,
            traffic=Traffic(arrived=self.arrived),
            outcomes=outcomes,
        )
        self.trial, self.verdict = advance(self.trial, view, self.config)
        self.at_s += 0.25

    def outcome(self, at_s=None, **fields):
        """Return a request decided now that took a tenth of a second to its first token."""
        known = {"revision": self.revision, "decided_at_s": self.at_s if at_s is None else at_s}
        return RequestOutcome(**(known | {"ttft_s": 0.1, "e2e_s": 0.2} | fields))

    def slot(self, count=30, **fields):
        """Let a slot pass with so many requests, decided where they count, and begin the next."""
        begun, number = self.at_s, len(self.trial.slots)
        while self.verdict is None and len(self.trial.slots) == number and self.at_s < begun + 6:
            middle = self.at_s == begun + 2
            outcomes = [self.outcome(**fields) for _ in range(count)] if middle else []
            self.view(*outcomes, arrived=len(outcomes))


def test_slots_come_in_the_order_a_b_b_a():
    """A drift over the trial falls on both settings alike."""
    bench = Bench()
    bench.view()
    order = []
    for _ in range(8):
        order.append(bench.trial.slots[-1].candidate)
        bench.slot()
    assert order == [False, True, True, False] * 2


def test_a_slot_begins_when_its_setting_is_in_force():
    """A record takes a tick to be published; the first second after it is not judged."""
    bench = Bench()
    bench.view()
    assert (bench.trial.slots[0].from_s, bench.trial.slots[0].until_s) == (101.0, 104.0)
    while bench.trial.setting == STATIC:
        bench.view()
    asked_at_s = bench.at_s - 0.25
    assert (asked_at_s, len(bench.trial.slots)) == (104.0, 1)
    bench.view()
    assert (bench.trial.slots[1].from_s, bench.trial.slots[1].until_s) == (105.25, 108.25)


def test_requests_at_a_slots_start_are_not_judged():
    """Interference: they still meet the queue that the slot before has left."""
    bench = Bench()
    bench.view()
    for at_s, counted in ((100.5, 0), (100.99, 0), (101.0, 1), (103.9, 2)):
        bench.at_s = at_s + 0.1 if at_s >= 101 else 101.0
        bench.view(bench.outcome(at_s))
        assert bench.trial.slots[0].all.count == counted


def test_requests_decided_under_another_revision_are_not_judged():
    """A router that lags, or fell back to its static parameters, did not serve under the slot's setting."""
    bench = Bench()
    bench.view()
    bench.at_s = 102.0
    bench.view(bench.outcome(revision=0), bench.outcome(revision=2), bench.outcome())
    assert bench.trial.slots[0].all.count == 1


def test_a_new_record_of_the_same_setting_does_not_end_a_slot():
    """A regime that falls during a candidate's turn is recorded anew: no request is missed for it."""
    bench = Bench()
    bench.view()
    bench.slot()
    begun = bench.at_s
    while len(bench.trial.slots) == 2 and bench.verdict is None:
        if bench.at_s == begun + 1.5:
            bench.revision += 1
        bench.view(*[bench.outcome()] * 2, arrived=2)
    assert bench.verdict is None
    slot = bench.trial.slots[1]
    assert slot.revisions == (2, 3)
    assert (slot.early.count, slot.arrived) == (24, 24)


def test_a_request_that_ends_late_counts_for_its_own_slot_as_long_as_for_any_other():
    """Two slots after its own; what has no end by then is missing from both arms alike."""
    bench = Bench()
    bench.view()
    bench.slot(count=0)
    late = bench.outcome(102.0, revision=1)
    bench.at_s = 112.0
    bench.view(late)
    assert (bench.trial.slots[0].all.count, bench.trial.slots[0].early.count) == (1, 0)
    bench.at_s = 112.5
    bench.view(late)
    assert bench.trial.slots[0].all.count == 1


def test_a_candidate_that_is_far_worse_is_given_up_after_its_first_slot():
    """Bad news counts at once."""
    bench = Bench()
    bench.view()
    bench.slot()
    bench.slot(ttft_s=0.2)
    assert (bench.verdict, len(bench.trial.slots)) == (Verdict.WORSE, 2)


def test_a_candidate_under_which_requests_do_not_end_is_given_up_after_its_first_slot():
    """The worst of all requests are the last to be seen: arrivals without an end speak for them."""
    bench = Bench()
    bench.view()
    bench.slot()
    while bench.trial.setting == TAU and bench.verdict is None:
        bench.view(arrived=3)
    assert (bench.verdict, len(bench.trial.slots)) == (Verdict.WORSE, 2)


def test_failures_under_the_candidate_end_a_trial_at_once():
    """Three, and more than twice those under the setting in force."""
    bench = Bench()
    bench.view()
    bench.slot()
    bench.at_s += 1.5
    failed = {"failed": True, "ttft_s": None, "e2e_s": None}
    bench.view(bench.outcome(**failed), bench.outcome(**failed))
    assert bench.verdict is None
    bench.view(bench.outcome(**failed))
    assert bench.verdict is Verdict.FAILED


def test_failures_under_both_are_not_the_candidates():
    """A worker died: it is no matter of the setting."""
    bench = Bench()
    bench.view()
    failed = {"failed": True, "ttft_s": None, "e2e_s": None}
    bench.slot(count=2, **failed)
    bench.at_s += 1.5
    bench.view(*[bench.outcome(**failed) for _ in range(4)])
    assert (bench.verdict, bench.trial.slots[1].failed) == (None, 4)


def test_a_pin_ends_a_trial_at_once():
    """An operator's word is in force, in a slot or where a slot should begin."""
    bench = Bench()
    bench.view()
    bench.view(in_force=msgspec.structs.replace(STATIC, overlap_weight=0.1))
    assert bench.verdict is Verdict.INTERRUPTED


def test_a_setting_that_does_not_come_into_force_ends_a_trial():
    """Mode shadow, a failing store: 5 s are enough."""
    bench = Bench()
    bench.view()
    while bench.verdict is None:
        bench.view(in_force=STATIC)
    assert (bench.verdict, bench.at_s - 0.25) == (Verdict.INTERRUPTED, 109.0)
    assert len(bench.trial.slots) == 1


def test_slots_with_too_few_requests_are_void_and_three_such_pairs_end_a_trial():
    """20 requests that ended make a slot; without traffic there is nothing to be judged."""
    bench = Bench()
    bench.view()
    for _ in range(9):
        bench.slot(count=19)
    assert (bench.verdict, bench.trial.changes, bench.trial.judged_pairs) == (Verdict.TOO_LITTLE, (), 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_candidate_that_is_better_is_kept_within_8_pairs(seed):
    """25 % less, 12 % common noise in every two seconds: by the policy that runs the trial."""

    world = World(
        AutoPolicy(CONFIG), noisy(tau=0.75, slot_sigma=0.12, seed=seed), seed=seed, predicted=only(TAU)
    )
    world.run_until("trial")
    assert world.run_until("kept", within_s=8 * 2 * 4.5 + 8) >= 4 * 2 * 4
    assert world.wanted == TAU
