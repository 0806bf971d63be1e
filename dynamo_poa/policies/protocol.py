"""What a policy is shown, and what it answers.

Owns: the contract every policy keeps.
Does not own: any policy, when one is asked (controller.py), what becomes of one that fails (running.py).
Invariant: a policy is pure: all it remembers is in the state it is given back, all it sees is in the view,
           any chance is drawn from a seed in its state. It answers every view, also an absurd one.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from dynamo_poa.decisions import Traffic
from dynamo_poa.values import Regime, RequestOutcome, Setting


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy sees of one tick.

    at_s:          monotonic
    resource:      `<role>.<resource>` of the pool that drives the regime, such as `prefill.queue`; else empty
    in_force:      what the routers were told to do, None before the first record
    revision:      of that record, 0 before it
    since_s:       how long it has been in force unchanged
    ours:          it is the policy's word; else an operator's, or a mode's that applies nothing
    static:        the configured defaults
    cache_absent:  no worker differs in what it holds of a prompt, so that ω moves nothing
    calibrated:    latency models of the workers exist
    outcomes:      requests that ended since the last view, oldest first, each told once
    predicted:     mean cost in seconds of the recent decisions under each setting, by the calibrated model;
                   a setting that is missing could not be priced
    """

    at_s: float
    regime: Regime
    static: Setting
    resource: str = ""
    in_force: Setting | None = None
    revision: int = 0
    since_s: float = 0.0
    ours: bool = False
    traffic: Traffic = Traffic()
    cache_absent: bool = False
    calibrated: bool = False
    outcomes: tuple[RequestOutcome, ...] = ()
    predicted: Mapping[Setting, float] = {}


class Answer(msgspec.Struct, frozen=True):
    """What a policy wants.

    reason:  short and of a small fixed set, for counting: `table`, `static`, `no_candidate_better`, ...
    detail:  the same in words where there is more to say
    tentative:  a candidate under trial: not a setting to be held when the policy cannot be asked
    """

    setting: Setting
    reason: str
    detail: str = ""
    tentative: bool = False


class Policy(Protocol):
    """Decides how requests are routed; `name` is its key in the configuration."""

    name: str

    def start(self) -> Any:
        """Return the state of a policy that has seen nothing: any frozen value, None where none is kept."""
        ...

    def decide(self, state: Any, view: View) -> tuple[Any, Answer]:
        """Return the next state and the answer to this view; without data, the defaults."""
        ...
