"""A policy that fails: what stands in for it, for how long, and what is told."""

import math

import msgspec
import pytest
from policy_steps import Steps

from dynamo_poa.config import ControllerConfig, PolicyConfig, RegimeConfig
from dynamo_poa.controller import pinned
from dynamo_poa.policies import Answer, View
from dynamo_poa.policies.running import FAILED, PolicyRun, next_answer
from dynamo_poa.values import Applied, ParamsKind, Pin, Regime, Setting

STATIC, GOOD = Setting(0.2, 0.9), Setting(0.5, 0.5)


class Scripted:
    """Answers the next of its script; an exception in it is raised. Its state counts the answers."""

    name = "scripted"

    def __init__(self, *script):
        self.script = list(script)
        self.states = []

    def start(self):
        return 0

    def decide(self, state, view):
        self.states.append(state)
        now = self.script.pop(0)
        if isinstance(now, Exception):
            raise now
        return (state + 1, Answer(now, "scripted")) if isinstance(now, Setting) else now


def guard(ask):
    """Stand in for the loop's."""
    try:
        return ask()
    except (ValueError, ZeroDivisionError) as error:
        return error


def at(at_s):
    return View(at_s=at_s, regime=Regime.BELOW, static=STATIC)


def ask(policy, run, at_s):
    return next_answer(policy, run, at(at_s), 60.0, guard)


def test_a_policy_that_raises_is_not_asked_for_the_cooldown_and_its_last_good_word_stands():
    """Then it begins anew: what it remembered may be what it failed of."""
    policy = Scripted(GOOD, ValueError("no"), GOOD)
    run, answer = ask(policy, PolicyRun(), 100.0)
    assert answer == Answer(GOOD, "scripted")
    run, answer = ask(policy, run, 101.0)
    standing = Answer(GOOD, FAILED, "the policy failed: ValueError('no')")
    assert (answer, run.errors, run.disabled_until_s) == (standing, 1, 161.0)
    run, answer = ask(policy, run, 160.9)
    assert (answer, len(policy.states)) == (standing, 2)
    run, answer = ask(policy, run, 161.0)
    assert answer == Answer(GOOD, "scripted")
    assert policy.states == [0, 1, 0]
    assert run == PolicyRun(memory=1, started=True, last_good=answer, errors=1)


def test_one_that_never_had_a_good_word_leaves_the_static_setting():
    """The safe state on any doubt."""
    run, answer = ask(Scripted(ZeroDivisionError("x")), PolicyRun(), 100.0)
    assert answer.setting == STATIC
    assert run.last_good is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "no answer: None"),
        ((1, GOOD), f"no answer: (1, {GOOD!r})"),
        ((1, Answer((0.5, 0.5), "pair")), "no setting: (0.5, 0.5)"),
        ((1, Answer(GOOD, None)), "no reason: None"),  # /metrics could not be told
        (Setting(math.nan, 1.0), "router_temperature = nan: must be a finite number in [0, 100]"),
        (Setting(100.5, 1.0), "router_temperature = 100.5: must be a finite number in [0, 100]"),
        (Setting(0.0, -0.1), "overlap_weight = -0.1: must be a finite number in [0, 2]"),
        (Setting(0.0, 1.0, 17.0), "prefill_load_scale = 17.0: must be a finite number in [0, 16]"),
        (Setting(0.0, 1.0, True), "prefill_load_scale = True: must be a finite number in [0, 16]"),
        (Setting(0.0, 1.0, None, "best"), "selection = 'best': must be one of kv, marginal"),
    ],
)
def test_an_answer_no_router_may_be_told_is_an_error_like_any_other(answer, error):
    """Bounded output: RouterParams is the judge of it."""
    run, stands = ask(Scripted(answer), PolicyRun(last_good=Answer(GOOD, "scripted")), 100.0)
    assert (stands.setting, run.errors, run.error) == (GOOD, 1, error)


def channel_of(policy, shadow=None):
    """Return the step under scripted policies."""
    config = ControllerConfig(policy=PolicyConfig(cooldown_s=3.0), regime=RegimeConfig())
    return Steps(config, policy, STATIC, shadow=shadow, guard=guard)


def test_a_failure_is_told_once_and_so_is_the_return():
    """poa.policy.failed and poa.policy.resumed; parameters stay where they were, ticks go on."""
    channel = channel_of(Scripted(GOOD, ValueError("no"), Setting(0.0, 1.0)))
    channel.tick()
    told = [event for _ in range(4) for event in channel.tick().events]
    assert [(event.name, event.after) for event in told] == [
        ("poa.policy.failed", {"asked": False}),
        ("poa.policy.resumed", {"asked": True}),
        ("poa.params.applied", msgspec.structs.asdict(Setting(0.0, 1.0))),
    ]
    assert [event.reason for event in told[:2]] == ["ValueError('no')", "3 s have passed"]
    failed = told[0]
    assert failed.before == {"asked": True}
    assert failed.details == {"policy": "scripted", "errors": 1}
    assert channel.current.setting == Setting(0.0, 1.0)


def test_while_it_is_disabled_the_record_says_so_and_the_last_good_setting_is_in_force():
    """Telemetry: reason policy_failed, time left, errors."""
    channel = channel_of(Scripted(GOOD, ValueError("no")))
    channel.tick()
    revision = channel.current.revision
    effects = channel.tick()
    assert (channel.current.setting, channel.current.revision, effects.publish) == (GOOD, revision, None)
    policy = effects.record.policy
    assert (policy.name, policy.setting, policy.reason) == ("scripted", GOOD, "policy_failed")
    assert (policy.disabled_left_s, policy.errors) == (3.0, 1)
    assert channel.tick().record.policy.disabled_left_s == 2.0


def test_a_pin_counts_while_the_policy_is_disabled():
    """An operator's word wins, also over a failure."""
    channel = channel_of(Scripted(ValueError("no")))
    channel.state = pinned(channel.state, Pin(router_temperature=1.0, overlap_weight=0.0))
    channel.tick()
    assert (channel.current.setting, channel.current.kind) == (Setting(1.0, 0.0), ParamsKind.PIN)


def test_a_shadow_is_asked_beside_and_only_recorded():
    """What it would have done and its predicted gain, never in force."""
    shadow = Setting(0.7, 1.0, 4.0)
    channel = channel_of(Scripted(GOOD, GOOD), Scripted(shadow, shadow))
    channel.tick()
    effects = channel.tick(predicted={GOOD: 2.0, shadow: 1.5})
    assert channel.current.setting == GOOD
    assert effects.publish is None
    assert effects.record.shadow.setting == shadow
    assert effects.record.shadow.predicted_gain_frac == 0.25
    assert effects.record.policy.predicted_gain_frac == 0.0
    assert effects.record.wanted_prefill_load_scale is None


def test_a_shadow_that_fails_disables_nothing_but_itself():
    """Counted and told by its own name."""
    channel = channel_of(Scripted(GOOD, GOOD), Scripted(ValueError("no")))
    effects = channel.tick()
    assert (effects.record.policy.errors, effects.record.shadow.errors) == (0, 1)
    assert channel.current.setting == GOOD
    assert [event.name for event in effects.events] == ["poa.policy.failed", "poa.params.applied"]
    assert channel.tick().record.policy.reason == "scripted"


def test_what_cannot_be_priced_has_no_predicted_gain():
    """Absent, not 0: no price for one of both, or nothing that could be saved."""
    channel = channel_of(Scripted(GOOD, GOOD, GOOD))
    channel.tick()
    assert channel.tick(predicted={STATIC: 1.0}).record.policy.predicted_gain_frac is None
    assert channel.tick(predicted={GOOD: 0.0}).record.policy.predicted_gain_frac is None


def test_on_stale_data_no_policy_is_asked():
    """What it would see is what it has seen; the last answers stand."""
    policy, shadow = Scripted(GOOD), Scripted(STATIC)
    channel = channel_of(policy, shadow)
    channel.tick()
    record = channel.tick(bus_connected=False).record
    assert record.applied is Applied.HELD_STALE
    assert (record.policy.setting, record.shadow.setting) == (GOOD, STATIC)
    assert (policy.states, shadow.states) == ([0], [0])


def test_a_view_says_what_is_in_force_whose_it_is_and_since_when():
    """A policy must know whether its word counts before it judges by what it sees."""
    seen = []

    class Watching(Scripted):
        def decide(self, state, view):
            seen.append((view.in_force, view.revision, view.since_s, view.ours))
            return super().decide(state, view)

    channel = channel_of(Watching(*[GOOD] * 5))
    for _ in range(3):
        channel.tick()
    channel.state = pinned(channel.state, Pin(router_temperature=1.0, overlap_weight=0.0))
    channel.tick()
    channel.tick()
    pin = Setting(1.0, 0.0)
    assert seen == [
        (None, 0, 0.0, False),
        (GOOD, 1, 0.0, True),
        (GOOD, 1, 1.0, True),
        (GOOD, 1, 2.0, True),
        (pin, 2, 0.0, False),
    ]


def test_the_records_of_a_run_are_plain_values():
    """A tick can be decided again: the state is frozen and equal to itself decided twice."""
    one, two = channel_of(Scripted(GOOD, ValueError("no"))), channel_of(Scripted(GOOD, ValueError("no")))
    assert [msgspec.to_builtins(one.tick().record) for _ in range(2)] == [
        msgspec.to_builtins(two.tick().record) for _ in range(2)
    ]
    assert one.state == two.state


def test_a_tentative_answer_is_followed_and_never_what_stands_in():
    """A candidate under trial is no last good word: what stands in is the one before it."""
    trying = (1, Answer(STATIC, "trial", tentative=True))
    policy = Scripted(GOOD, trying, ValueError("no"))
    run, _ = ask(policy, PolicyRun(), 100.0)
    run, answer = ask(policy, run, 101.0)
    assert (answer.setting, run.last_good, run.tentative) == (STATIC, Answer(GOOD, "scripted"), True)
    run, answer = ask(policy, run, 102.0)
    assert answer == Answer(GOOD, FAILED, "the policy failed: ValueError('no')")
