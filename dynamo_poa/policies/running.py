"""Whether a policy is asked, and what counts as its word when it fails.

Owns: its memory from tick to tick, judging its answers, the cool-down after a failure, the last good answer.
Does not own: the policy, catching what it raises (loop.py), whether its word is applied (controller.py).
Invariant: pure; what comes out is a word that RouterParams accepts, whatever a policy answers or raises.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_poa.errors import ParamsError
from dynamo_poa.policies.protocol import Answer, Policy, View
from dynamo_poa.values import RouterParams, Setting

Asked = tuple[Any, Answer]
Guard = Callable[[Callable[[], Asked]], Asked | Exception]

FAILED = "policy_failed"


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    """A policy between two ticks.

    memory:            its own state, meaningful once it was `started`
    last_good:         its last answer that could be used and was not tentative
    tentative:         its last answer was
    disabled_until_s:  monotonic; None while it is asked
    error:             what it last failed of, empty while it is asked
    """

    memory: Any = None
    started: bool = False
    last_good: Answer | None = None
    tentative: bool = False
    errors: int = 0
    disabled_until_s: float | None = None
    error: str = ""


def restarted(run: PolicyRun) -> PolicyRun:
    """Return a policy that has seen nothing; how often it has failed is still known."""
    return PolicyRun(errors=run.errors)


def unguarded(ask: Callable[[], Asked]) -> Asked | Exception:
    """Ask, and let whatever a policy raises through."""
    return ask()


def next_answer(
    policy: Policy, run: PolicyRun, view: View, cooldown_s: float, guard: Guard = unguarded
) -> tuple[PolicyRun, Answer]:
    """Ask the policy, or say why its last good word stands.

    One that fails is not asked for `cooldown_s` and then begins anew: what it remembered may be the cause.
    """
    if run.disabled_until_s is not None:
        if view.at_s < run.disabled_until_s:
            return run, _standing(run, view)
        run = msgspec.structs.replace(restarted(run), last_good=run.last_good)

    def ask() -> Asked:
        return policy.decide(run.memory if run.started else policy.start(), view)

    found = guard(ask)
    error = repr(found) if isinstance(found, Exception) else _fault(found)
    if error or isinstance(found, Exception):
        run = msgspec.structs.replace(
            run, errors=run.errors + 1, disabled_until_s=view.at_s + cooldown_s, error=error
        )
        return run, _standing(run, view)
    memory, answer = found
    last_good = run.last_good if answer.tentative else answer
    run = msgspec.structs.replace(
        run, memory=memory, started=True, last_good=last_good, tentative=answer.tentative
    )
    return run, answer


def _standing(run: PolicyRun, view: View) -> Answer:
    """Return what stands in for a policy that is not asked: its last good word, else the defaults."""
    setting = view.static if run.last_good is None else run.last_good.setting
    return Answer(setting, FAILED, f"the policy failed: {run.error}")


def _fault(found: Any) -> str:
    """Return why an answer cannot be used, empty when it can."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Answer)):
        return f"no answer: {found!r}"
    setting, reason = found[1].setting, found[1].reason
    if not (isinstance(reason, str) and reason):
        return f"no reason: {reason!r}"
    if not isinstance(setting, Setting):
        return f"no setting: {setting!r}"
    try:
        RouterParams(revision=0, **msgspec.structs.asdict(setting))
    except ParamsError as error:
        return str(error)
    return ""
