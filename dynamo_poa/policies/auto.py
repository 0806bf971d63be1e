"""Which parameters serve the present traffic best, found by trying one change at a time.

Owns: which candidate is tried when; what is in force between trials; following the conditions that a setting
      was found under.
Does not own: a trial (trial.py), its judgement (judge.py), what is remembered (memory.py), prices of settings
              (the view's `predicted`, counterfactual.py).
Invariant: pure, without chance. Between trials the answer is the start's setting or one that has won a trial
           under these conditions; without data it is the start's. A candidate that turns out worse is left at
           once. Nothing is tried while an operator's word counts, without enough traffic to judge, or that
           the calibrated model says is much worse.
Source: issue 6; measured: the right direction of τ depends on which resource saturates (paper.md).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from dynamo_poa.config import PolicyConfig
from dynamo_poa.policies.judge import Verdict
from dynamo_poa.policies.memory import (
    UNDECIDED_STRENGTH,
    Entry,
    Key,
    Load,
    Memory,
    best_known,
    forget,
    has_lost,
    inherited,
    remember,
)
from dynamo_poa.policies.protocol import Answer, View
from dynamo_poa.policies.trial import Trial, advance, begin
from dynamo_poa.values import Regime, Setting

TEMPERATURES = (0.0, 0.3, 0.7)
OVERLAP_WEIGHTS = (1.0, 0.5)
PREFILL_LOAD_SCALES = (None, 4.0)
TRIAL_SLOTS = 4  # a whole turn of both settings
SAME_FRAC = 1e-9  # predictions as close as this differ by rounding: the order of candidates counts
NO_PREDICTION = "no price for what is in force: no latency models, or no decisions with candidates recorded"

Starts = Mapping[Regime, Setting]


class AutoState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from view to view.

    key:         the conditions that are followed
    other:       conditions that are not followed yet, since `other_at_s`
    base:        the last good setting: what is in force between trials; None before the first view
    moved_at_s:  when `base` last changed to a setting that was remembered
    rest_until_s:  no trial begins before
    last:        how the last trial under these conditions ended, while nothing else is to be said
    """

    key: Key = Key(Regime.BELOW, "")
    other: Key | None = None
    other_at_s: float = 0.0
    base: Setting | None = None
    moved_at_s: float | None = None
    rest_until_s: float | None = None
    last: Verdict | None = None
    load: Load = Load()
    memory: Memory = ()
    trial: Trial | None = None


class _Next(NamedTuple):
    """The candidate to try, or why there is none."""

    candidate: Setting | None
    reason: str
    detail: str = ""


def candidates(base: Setting, static: Setting, *, cache_absent: bool = False) -> Iterator[Setting]:
    """Yield what may be tried from a setting: one change at a time, or all of them taken back.

    ω and the prefill load scale weigh a cache against load: without a cache there is nothing to be weighed.
    """
    seen = {base}
    changed: list[dict[str, float | None]] = [
        {"router_temperature": temperature} for temperature in TEMPERATURES
    ]
    if not cache_absent:
        changed += [{"overlap_weight": value} for value in OVERLAP_WEIGHTS]
        changed += [{"prefill_load_scale": value} for value in PREFILL_LOAD_SCALES]
    for setting in (static, *(msgspec.structs.replace(base, **change) for change in changed)):
        if setting not in seen:
            seen.add(setting)
            yield setting


class AutoPolicy:
    """Tries, judges, keeps or returns; stands still when nothing helps.

    Args:  starts: by regime what is in force until something better is found; empty for the static setting.
    """

    name = "auto"

    def __init__(self, config: PolicyConfig, starts: Starts | None = None) -> None:
        self._config = config
        self._starts = starts or {}

    def start(self) -> AutoState:
        """Remember nothing."""
        return AutoState()

    def decide(self, state: AutoState, view: View) -> tuple[AutoState, Answer]:
        """Follow the conditions, carry a trial on, or begin one."""
        state = self._follow(state, view)
        if state.trial is not None:
            trial, verdict = advance(state.trial, view, self._config)
            if verdict is None:
                return msgspec.structs.replace(state, trial=trial), self._on_trial(trial)
            state = self._concluded(state, trial, verdict, view.at_s)
        state, base = self._settled(state, view)
        next_up = self._next(state, view, base)
        if next_up.candidate is None:
            return state, Answer(base, next_up.reason, next_up.detail)
        trial = begin(base, next_up.candidate, view.at_s)
        trial, _ = advance(trial, msgspec.structs.replace(view, outcomes=()), self._config)
        return msgspec.structs.replace(state, trial=trial), self._on_trial(trial)

    def _follow(self, state: AutoState, view: View) -> AutoState:
        """Take in the load and the conditions; a trial under other conditions is over, without a verdict.

        A higher regime counts at once. What else changes does when it has lasted: a slot, and in a trial,
        whose own turns may be what lowers the regime, TRIAL_SLOTS of them.
        """
        key, load, trial = (
            Key(view.regime, view.resource),
            state.load.next(view.traffic, view.at_s),
            state.trial,
        )
        if key == state.key:
            return msgspec.structs.replace(state, load=load, other=None)
        other_at_s = state.other_at_s if key == state.other else view.at_s
        state = msgspec.structs.replace(state, load=load, other=key, other_at_s=other_at_s)
        lasted_s = view.at_s - other_at_s
        rises = view.regime.level > state.key.regime.level
        at_once = rises or (trial is None and view.regime is not state.key.regime)
        if not at_once and lasted_s < self._config.slot_s * (1 if trial is None else TRIAL_SLOTS):
            return state
        if trial is not None:
            # Whether the candidate has raised the regime is not known: it is not tried at once again.
            suspected = rises and any(slot.candidate for slot in trial.slots)
            verdict = Verdict.UNDECIDED if suspected else Verdict.INTERRUPTED
            state = self._concluded(state, trial, verdict, view.at_s)
            state = msgspec.structs.replace(state, last=Verdict.INTERRUPTED)
        else:
            state = msgspec.structs.replace(state, last=None)
        memory = state.memory if rises else inherited(state.memory, state.key, key, view.at_s)
        return msgspec.structs.replace(
            state, key=key, other=None, memory=memory, rest_until_s=view.at_s + self._config.rest_s
        )

    def _settled(self, state: AutoState, view: View) -> tuple[AutoState, Setting]:
        """Bring memory and base up to date: the best known under these conditions, else the start's setting.

        A remembered setting is returned to at most once in `rest_s`; the start's setting at any time.
        """
        memory = forget(state.memory, state.key, state.load, view.at_s, self._config.memory_half_life_s)
        start = self._starts.get(view.regime, view.static)
        wanted = best_known(memory, state.key) or start
        moved_at_s = state.moved_at_s
        if wanted not in (start, state.base):
            if moved_at_s is not None and 0 <= view.at_s - moved_at_s < self._config.rest_s:
                wanted = start
            else:
                moved_at_s = view.at_s
        return msgspec.structs.replace(state, memory=memory, base=wanted, moved_at_s=moved_at_s), wanted

    def _next(self, state: AutoState, view: View, base: Setting) -> _Next:
        """Return the candidate that the model likes best of those that may be tried now."""
        config = self._config
        if view.in_force != base or not view.ours:
            return _Next(None, "not_in_force" if state.last is None else str(state.last))
        resting = state.rest_until_s is not None and view.at_s < state.rest_until_s
        if resting or view.since_s < config.slot_s:
            return _Next(None, "resting" if state.last is None else str(state.last))
        judged_s = config.slot_s - config.settle_s
        if (state.load.arrival_rate or 0.0) * judged_s < config.min_requests:
            return _Next(None, str(Verdict.TOO_LITTLE))
        priced = view.predicted.get(base)
        if priced is None or not priced > 0:
            return _Next(None, "no_prediction", NO_PREDICTION)
        found: tuple[float, Setting] | None = None
        said = []
        for setting in candidates(base, view.static, cache_absent=view.cache_absent):
            price = view.predicted.get(setting)
            if price is None or not price >= 0:
                said.append(f"{setting}: not priced")
            elif price > (1 + config.prior_margin_frac) * priced:
                said.append(f"{setting}: predicted {price / priced - 1:+.1%}")
            elif has_lost(state.memory, state.key, setting, base):
                said.append(f"{setting}: tried")
            elif setting == view.static:  # the first thing to be sure of: that what is in force beats it
                return _Next(setting, "trial")
            elif found is None or price < found[0] * (1 - SAME_FRAC):
                found = price, setting
        if found is None:
            return _Next(None, "no_candidate_better", "; ".join(said))
        return _Next(found[1], "trial")

    def _on_trial(self, trial: Trial) -> Answer:
        pair = min(len(trial.slots) // 2 + 1, self._config.max_pairs)
        detail = f"{trial.candidate} against {trial.base}, pair {pair} of at most {self._config.max_pairs}"
        return Answer(trial.setting, "trial", detail, tentative=trial.setting != trial.base)

    def _concluded(self, state: AutoState, trial: Trial, verdict: Verdict, at_s: float) -> AutoState:
        """Note how a trial ended; an interrupted one, or without traffic, says nothing of its candidate."""
        compared = trial.candidate, trial.base
        shown: list[tuple[Setting, Setting, bool, float]] = []
        if verdict is Verdict.KEPT:
            shown = [(*compared, True, 1.0), (trial.base, trial.candidate, False, 1.0)]
        elif verdict in (Verdict.WORSE, Verdict.FAILED):
            shown = [(*compared, False, 1.0)]
        elif verdict is Verdict.UNDECIDED:
            shown = [(*compared, False, UNDECIDED_STRENGTH)]
        memory = state.memory
        for setting, base, won, strength in shown:
            entry = Entry(
                key=state.key,
                setting=setting,
                base=base,
                won=won,
                strength=strength,
                at_s=at_s,
                load=state.load,
            )
            memory = remember(memory, entry)
        return msgspec.structs.replace(
            state, trial=None, memory=memory, last=verdict, rest_until_s=at_s + self._config.rest_s
        )
