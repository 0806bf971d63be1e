"""How the caches follow a change of setting: routing leads, what lies there comes after (Stackelberg).

Owns: when caches have followed, and the hit shares before, meanwhile and after.
Does not own: the changes (controller.py), what is found cached (decisions.py), duplication (placement.py).
Invariant: pure and bounded; a phase of too few requests has no share, least of all 0. Of a change that
           another one overtakes, the phases that had not ended stay unknown.
Source: paper, the three coupled games: the router's choice decides what is cached, on the caches' time scale.
"""

from collections.abc import Iterable

import msgspec

from dynamo_poa.coupling import CacheSwap
from dynamo_poa.values import Role, Setting, WorkerCard

PHASE_S = 20.0  # before a change, and after the caches have followed
SETTLED_S = 30.0  # they have by then at the latest
MIN_REQUESTS = 20  # of a phase
MARK_S = 1.0  # the past is remembered so finely


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick sees. Counts are those since the start: `decisions.DecisionLog` has the first three.

    at_s, wall_s:  monotonic, and epoch
    setting:       in force; None before the first
    stored_blocks, pool_blocks:  `turnover` of the caches; None is unknown
    duplication:   as last priced
    """

    at_s: float
    wall_s: float
    setting: Setting | None = None
    prompts_seen: int = 0
    prompt_tokens_seen: int = 0
    cached_tokens_seen: int = 0
    stored_blocks: int | None = None
    pool_blocks: int | None = None
    duplication: float | None = None


class FollowState(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from tick to tick.

    setting:   last seen in force
    past:      ticks since the last change, PHASE_S back at most, about one a second; the newest is the last
    began:     when the phase began that lasts; None while none does
    turning:   that phase is the caches' turnover, not what comes after it
    swap:      the last change, as far as its phases have ended
    """

    setting: Setting | None = None
    past: tuple[Seen, ...] = ()
    began: Seen | None = None
    turning: bool = False
    swap: CacheSwap | None = None


class Following:
    """Keeps the state of `follow` between ticks."""

    def __init__(self) -> None:
        """Begin before any setting."""
        self._state = FollowState()

    def observe(self, seen: Seen) -> CacheSwap | None:
        """Take in a tick; return the last change as far as its phases have ended, None before the first."""
        self._state, swap = follow(self._state, seen)
        return swap


def follow(state: FollowState, seen: Seen) -> tuple[FollowState, CacheSwap | None]:
    """Take in a tick.

        before    the last PHASE_S before the tick that saw the change, and not from before the last change
        during    until as many blocks were stored as the pool holds, SETTLED_S at most
        after     the PHASE_S after that

    A setting acts from the tick that published it, and is first seen in force by the next: what was decided
    between the two counts as `during`. Only ω and the selection move caches; other changes end no phase.
    """
    setting = seen.setting or state.setting
    if setting is not None and state.setting is not None and _leads(state.setting, setting):
        state = _begun(state, state.setting, setting, seen)
    elif state.began is not None and state.swap is not None:
        state = _gone_on(state, state.began, state.swap, seen)
    state = msgspec.structs.replace(state, setting=setting, past=_remembered(state.past, seen))
    return state, state.swap


def turnover(stored: Iterable[tuple[WorkerCard, int]]) -> tuple[int, int | None]:
    """Return how many blocks were ever stored where prompts are computed, and how many fit there.

    Args:     stored: `Fleet.stored_blocks()`.
    Returns:  None fit where a card does not say.
    """
    stored_blocks, sizes = 0, []
    for card, blocks in stored:
        if card.role is not Role.DECODE:
            stored_blocks += blocks
            sizes.append(card.total_kv_blocks)
    known = [size for size in sizes if size is not None]
    return stored_blocks, sum(known) if known and len(known) == len(sizes) else None


def _begun(state: FollowState, before: Setting, now: Setting, seen: Seen) -> FollowState:
    """Return the state in which a change has just been seen."""
    last = state.past[-1]  # there was a tick before: its setting is known
    swap = CacheSwap(
        at_s=seen.wall_s,
        overlap_weight_before=before.overlap_weight,
        overlap_weight_after=now.overlap_weight,
        hit_frac_before=_hit_frac(state.past[0], last),
        duplication_before=seen.duplication,
    )
    return msgspec.structs.replace(state, past=(last,), began=last, turning=True, swap=swap)


def _gone_on(state: FollowState, began: Seen, swap: CacheSwap, seen: Seen) -> FollowState:
    """Return the state after a tick of a phase, which may be its last."""
    hit_frac = _hit_frac(began, seen)
    if state.turning:
        if not _turned_over(began, seen):
            return state
        swap = msgspec.structs.replace(swap, hit_frac_during=hit_frac)
        return msgspec.structs.replace(state, began=seen, turning=False, swap=swap)
    if seen.at_s - began.at_s < PHASE_S:
        return state
    swap = msgspec.structs.replace(swap, hit_frac_after=hit_frac, duplication_after=seen.duplication)
    return msgspec.structs.replace(state, began=None, swap=swap)


def _leads(before: Setting, now: Setting) -> bool:
    """Tell whether a change of setting sends prompts elsewhere than where their prefixes lie."""
    return before.overlap_weight != now.overlap_weight or before.selection is not now.selection


def _turned_over(began: Seen, seen: Seen) -> bool:
    if seen.at_s - began.at_s >= SETTLED_S:
        return True
    if seen.pool_blocks is None or seen.stored_blocks is None or began.stored_blocks is None:
        return False
    return seen.stored_blocks - began.stored_blocks >= seen.pool_blocks


def _hit_frac(since: Seen, until: Seen) -> float | None:
    """Return the share of prompt tokens found cached between two ticks.

    Returns:  None for too few requests, and where no cache has ever shown anything: it may be off (E6).
    """
    prompt_tokens = until.prompt_tokens_seen - since.prompt_tokens_seen
    if (
        not until.cached_tokens_seen
        or until.prompts_seen - since.prompts_seen < MIN_REQUESTS
        or prompt_tokens <= 0
    ):
        return None
    return (until.cached_tokens_seen - since.cached_tokens_seen) / prompt_tokens


def _remembered(past: tuple[Seen, ...], seen: Seen) -> tuple[Seen, ...]:
    """Add a tick; ticks that lie within MARK_S of the one before them are dropped, but for the newest."""
    if len(past) > 1 and past[-1].at_s - past[-2].at_s < MARK_S:
        past = past[:-1]
    while past and seen.at_s - past[0].at_s > PHASE_S:
        past = past[1:]
    return (*past, seen)
