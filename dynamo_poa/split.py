"""Whether the workers are split well between prefill and decode: Γ_PD on what a controller knows.

Owns: reading the game off workers, their speed and the prompts of late; when too little is known; which
      change of split is looked at and how sure its gain is.
Does not own: what a split is predicted to give (games/allocation.py), when advice is given (advice.py), when
              it is priced (loop.py).
Invariant: noting is cheap and copies what may change, pricing may take place in any thread; unknown is a
           reason, never a guess. Requests are priced as an open loop unless closed_loop.py is sure of users,
           who are taken not to think: behind those who do, and whom it takes for an open loop, a better split
           would let more through than is predicted.
Source: theory.md, Γ_PD.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from dynamo_poa.bootstrap import moving_blocks
from dynamo_poa.closed_loop import users_of
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import AllocationEstimate, Attainment, Split
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import GameError
from dynamo_poa.games.allocation import (
    Mix,
    Pool,
    PoolLimits,
    Pools,
    attainments,
    best_split,
    equilibrium,
    price_of_anarchy,
)
from dynamo_poa.load import WorkerState
from dynamo_poa.prompts import PROMPT, PROMPT_SQUARED, REQUESTS, UNCACHED, UNCACHED_SQUARED, Floats
from dynamo_poa.values import Curve, Role, WorkerCard

MIN_PROMPTS = 50
MIN_SECONDS = 10
NEARLY_FRAC = 0.01  # a split so much worse than the best is as good, if it moves fewer workers
MOST_GAIN = 100.0
# Of requests within both objectives: a split that attains less serves nobody. What the model gives so few is
# the beginning of its horizon, before queues have grown, or the tail of a normal distribution.
SERVED_FRAC = 0.01
RESAMPLES = 200  # 1.2 ms each
_SPEED = {
    Role.PREFILL: lambda curve: curve.prefill_base_s + curve.prefill_token_s,
    Role.DECODE: lambda curve: curve.decode_base_s + curve.decode_request_s,
}


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of Γ_PD.

    split:          of worker instances, at present
    ranks:          that an instance has, each with a queue and cache of its own
    seconds:        prompts, as PromptWindow has them, oldest first
    output_tokens:  decoded of a request, mean
    context_tokens: that a request holds while it decodes, mean over iterations; None where no pass told
    users:          who wait for each answer before they ask again; 0 where that is not sure: an open loop
    """

    split: Split
    pools: Pools
    seconds: Floats
    output_tokens: float
    slo: SloConfig
    ranks: int = 1
    context_tokens: float | None = None
    users: int = 0


def note_split(
    at_s: float,
    workers: Iterable[WorkerState],
    decisions: DecisionLog,
    curves: Mapping[Role, Curve],
    output_tokens: Mapping[Role, float],
    slo: SloConfig,
    contexts: Mapping[Role, float],
) -> Callable[[], AllocationEstimate]:
    """Note the game as it stands at a monotonic instant, and return what prices it.

    Args:  curves: of each pool's median worker.  output_tokens, contexts: decoded of a request and held by it
           in each pool, means.
    """
    cards = {worker.key.worker_id: worker.card for worker in workers if not worker.stale}
    game = read_game(
        cards.values(),
        curves,
        decisions.prompts.seconds(at_s),
        output_tokens.get(Role.DECODE),
        slo,
        context_tokens=contexts.get(Role.DECODE),
        in_flight=decisions.prompts.in_flight(at_s),
    )
    return lambda: price_split(game)


def read_game(
    cards: Iterable[WorkerCard],
    curves: Mapping[Role, Curve],
    seconds: Floats,
    output_tokens: float | None,
    slo: SloConfig,
    *,
    context_tokens: float | None = None,
    in_flight: Floats | None = None,
) -> Game | str:
    """Return the game, or what is not known of it.

    Args:  in_flight: requests, in each of the seconds; None where nobody counted: an open loop.
    """
    by_role: dict[Role, list[WorkerCard]] = {}
    for card in cards:
        by_role.setdefault(card.role, []).append(card)
    if by_role.get(Role.AGGREGATED):
        return "workers are aggregated: there is no split"
    pools = {}
    for role in (Role.PREFILL, Role.DECODE):
        members, curve = by_role.get(role, []), curves.get(role)
        if not members:
            return f"no {role} workers"
        if curve is None or _SPEED[role](curve) <= 0:
            return f"the speed of {role} workers is not known yet"
        pools[role] = Pool(curve=curve, limits=_limits(members))
    ranks = {card.data_parallel_size for members in by_role.values() for card in members}
    if len(ranks) > 1:
        return "workers differ in data-parallel ranks: one cannot take another's place"
    prompts = int(seconds[:, REQUESTS].sum())
    if len(seconds) < MIN_SECONDS or prompts < MIN_PROMPTS:
        return f"{prompts} prompts in {len(seconds)} s, {MIN_PROMPTS} in {MIN_SECONDS} s needed"
    if output_tokens is None:
        return "too few requests have ended to tell how long answers are"
    return Game(
        split=Split(len(by_role[Role.PREFILL]), len(by_role[Role.DECODE])),
        pools=Pools(prefill=pools[Role.PREFILL], decode=pools[Role.DECODE]),
        seconds=seconds,
        output_tokens=output_tokens,
        slo=slo,
        ranks=ranks.pop(),
        context_tokens=context_tokens,
        users=0 if in_flight is None else users_of(in_flight, prompts / len(seconds)),
    )


def price_split(game: Game | str) -> AllocationEstimate:
    """Price the present split, and look for a better one; a game that is not known is a reason."""
    if isinstance(game, str):
        return AllocationEstimate(reason=game)
    split = game.split
    total = split.prefill + split.decode
    more = [Split(split.prefill + 1, split.decode), Split(split.prefill, split.decode + 1)]
    try:
        mix = _mix(game, game.seconds)
        priced = _price(game, mix, [*(Split(count, total - count) for count in range(1, total)), *more])
    except GameError as error:
        return AllocationEstimate(reason=str(error))
    every, (one_prefill, one_decode) = priced[:-2], priced[-2:]
    now, best = every[split.prefill - 1], best_split(every)
    poa_hat = price_of_anarchy(now, best) if serves(best) else None
    found = AllocationEstimate(
        poa_hat=poa_hat,
        reason="" if poa_hat is not None else _no_price(split, best),
        now=now,
        best=best,
        equilibrium=equilibrium(every),
        one_more_prefill=gain(now, one_prefill),
        one_more_decode=gain(now, one_decode),
    )
    target = nearest(every, now, best)
    if target is None:
        return found
    low, high = _interval(game, split, target.split)
    return msgspec.structs.replace(
        found, target=target, gain_frac=gain(now, target), gain_low=low, gain_high=high
    )


def nearest(every: Sequence[Attainment], now: Attainment, best: Attainment) -> Attainment | None:
    """Return the split that is as good as the best, or nearly, and moves fewest workers; None for no move.

    None also where the best serves nobody.

    Source:  beyond the best all splits are often about as good, and which one is ahead changes by the second.
    """
    good = [one for one in every if serves(one) and one.goodput_rps >= (1 - NEARLY_FRAC) * best.goodput_rps]
    if not good:
        return None
    target = min(good, key=lambda one: (abs(one.split.prefill - now.split.prefill), -one.goodput_rps))
    return None if target.split == now.split else target


def gain(now: Attainment, then: Attainment) -> float:
    """Return the goodput gained as a share of the present, 0 where neither serves anybody.

    No more than a hundredfold either way: a split that gets nothing done is infinitely worse, which no JSON
    number says.
    """
    if not (serves(now) or serves(then)):
        return 0.0
    least = 1 / (1 + MOST_GAIN)
    if now.goodput_rps <= then.goodput_rps * least:
        return MOST_GAIN
    return max(then.goodput_rps / now.goodput_rps, least) - 1


def serves(one: Attainment) -> bool:
    """Tell whether a split gets a share of requests done within both objectives that is worth the name."""
    return one.goodput_rps > 0 and one.ttft_frac * one.itl_frac >= SERVED_FRAC


def _no_price(split: Split, best: Attainment) -> str:
    who = f"{split} gets next to no request" if serves(best) else "no split gets requests"
    return f"{who} done within both objectives"


def _interval(game: Game, now: Split, then: Split) -> tuple[float, float]:
    """Return the 95 % interval of the gain over resampled arrivals; those without any say nothing.

    It is of the very minute that `then` was chosen on as the best of many, so its middle is too high by what
    that choice owes to chance: an advice has to hold for a while besides (advice.py). Users who wait are as
    many in every resample: only what they ask varies.

    Arrivals of one second say little of those a few seconds later, so blocks are short. Near capacity the
    gain grows tenfold within the noise of the rate: percentiles, for on no scale is that symmetric.
    """
    blocks = moving_blocks(len(game.seconds), RESAMPLES, power=1 / 3)
    gains = []
    for which in range(RESAMPLES):
        seconds = game.seconds[blocks.rows(slice(which, which + 1))[0]]
        if seconds[:, REQUESTS].any():
            before, after = _price(game, _mix(game, seconds), [now, then])
            gains.append(gain(before, after))
    return blocks.percentiles(np.array(gains))


def _price(game: Game, mix: Mix, splits: Sequence[Split]) -> tuple[Attainment, ...]:
    """Return what splits of instances give: a queue and a cache belong to a rank."""
    ranks = game.ranks
    of_ranks = [Split(split.prefill * ranks, split.decode * ranks) for split in splits]
    found = attainments(mix, game.pools, game.slo, of_ranks)
    return tuple(msgspec.structs.replace(one, split=split) for one, split in zip(found, splits, strict=True))


def _mix(game: Game, seconds: Floats) -> Mix:
    """Return what is asked, from the prompts second by second.

    context = prompt + output / 2       with the mean output, where no pass told what is held
    """
    sums = seconds.sum(axis=0)
    requests = sums[REQUESTS]
    uncached, prompt = float(sums[UNCACHED] / requests), float(sums[PROMPT] / requests)
    context = prompt + game.output_tokens / 2 if game.context_tokens is None else game.context_tokens
    prompt_variance = max(float(sums[PROMPT_SQUARED] / requests) - prompt**2, 0.0)  # rounding
    return Mix(
        arrival_rps=0.0 if game.users else float(requests / len(seconds)),
        users=game.users,
        uncached_tokens=uncached,
        uncached_squared=max(float(sums[UNCACHED_SQUARED] / requests), uncached**2),  # rounding
        context_tokens=context,
        context_squared=context**2 + prompt_variance,
        output_tokens=game.output_tokens,
    )


def _limits(cards: Sequence[WorkerCard]) -> PoolLimits:
    """Return what the pool's median worker holds; what no card tells has the engine's usual value."""
    usual = PoolLimits()
    kv_tokens = [card.total_kv_blocks * card.kv_block_size for card in cards if card.total_kv_blocks]
    seqs = [card.max_num_seqs for card in cards if card.max_num_seqs]
    batched = [card.max_num_batched_tokens for card in cards if card.max_num_batched_tokens]
    return PoolLimits(
        max_num_seqs=statistics.median_low(seqs) if seqs else usual.max_num_seqs,
        kv_tokens=statistics.median_low(kv_tokens) if kv_tokens else usual.kv_tokens,
        max_num_batched_tokens=statistics.median_low(batched) if batched else usual.max_num_batched_tokens,
    )
