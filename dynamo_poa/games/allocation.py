"""Which split of workers between prefill and decode gets most requests done within both objectives.

Owns: what is asked and what workers can hold, as the game sees them; what a split is predicted to give; the
      best split and the equilibrium; the price of the present one.
Does not own: how many wait and how long (queues.py), how the mix and the curves are measured (split.py,
              latency.py), when a change is advised (advice.py).
Invariant: pure. All splits are priced by the same model, so the best one is never worse than the present.
           Disaggregated pools of workers that are alike; whatever is not that is refused by the caller.
Source: theory.md, Γ_PD. Checked against Dynamo's simulator: docs/results-allocation.md.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import Attainment, Split
from dynamo_poa.errors import GameError
from dynamo_poa.games import queues
from dynamo_poa.values import Curve

Floats = NDArray[np.float64]

PROMPTS = 16  # lengths that stand for all, equally likely
INSTANTS = 49  # of a wait that are told apart, up to the objective
LIKE_FRAC = 1e-3  # shares of requests that differ by less are alike
DELAYS = 8  # of the decode pool's that are
# A request's mean over its stay varies less than its instants do: by 2 / e of the variance, when what it
# sees is forgotten as fast as requests leave (M/G/infinity).
STAY_FRAC = math.sqrt(2 / math.e)

LEAST_FRAC = 1e-9  # of the best goodput: a tail of the model, nobody's requests
_SURELY_S = 1e-9  # an iteration that varies less does not vary


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the two pools.

    arrival_rps:       requests/s of an open loop; 0 for a closed one
    users, think_s:    of a closed loop: who ask again so long after an answer's end; 0 for an open one
    uncached_tokens:   prompt tokens to be computed, mean over requests
    uncached_squared:  mean of its square
    context_tokens:    that a request holds while it decodes, mean: its prompt and half of its output
    context_squared:   mean of its square; 0 where it is not known: as if all were alike
    output_tokens:     mean
    horizon_s:         a pool over its capacity is judged by what it does so long, from empty queues
    """

    uncached_tokens: float
    uncached_squared: float
    context_tokens: float
    output_tokens: float
    context_squared: float = 0.0
    arrival_rps: float = 0.0
    users: int = 0
    think_s: float = 0.0
    horizon_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is no demand.

        Raises:  GameError.
        """
        for key in ("uncached_tokens", "context_tokens", "output_tokens", "horizon_s"):
            value = getattr(self, key)
            if not (0 < value < math.inf):
                raise GameError(key, value, "in (0, inf)")
        if not self.uncached_tokens**2 * (1 - 1e-9) <= self.uncached_squared < math.inf:
            raise GameError(
                "uncached_squared", self.uncached_squared, f"in [{self.uncached_tokens**2:g}, inf)"
            )
        if (
            self.context_squared
            and not self.context_tokens**2 * (1 - 1e-9) <= self.context_squared < math.inf
        ):
            bound = f"0 or in [{self.context_tokens**2:g}, inf)"
            raise GameError("context_squared", self.context_squared, bound)
        if not (0 <= self.arrival_rps < math.inf and self.users >= 0 and 0 <= self.think_s < math.inf):
            raise GameError(
                "arrival_rps, users, think_s", (self.arrival_rps, self.users, self.think_s), ">= 0"
            )
        if (self.arrival_rps > 0) == (self.users > 0):
            raise GameError("arrival_rps, users", (self.arrival_rps, self.users), "one of them 0, not both")

    def prompts(self) -> Floats:
        """Return equally likely lengths of about these moments: a lognormal's quantiles, `(PROMPTS,)`."""
        variation = max(self.uncached_squared / self.uncached_tokens**2 - 1, 0.0)
        sigma = math.sqrt(math.log1p(variation))
        lengths = np.exp(sigma * ndtri((np.arange(PROMPTS) + 0.5) / PROMPTS))
        return np.asarray(lengths * (self.uncached_tokens / lengths.mean()), dtype=np.float64)


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker of a pool holds.

    max_num_seqs:            requests at a time
    kv_tokens:               its KV cache
    max_num_batched_tokens:  of one pass; a longer prompt takes several
    """

    max_num_seqs: float = 256
    kv_tokens: float = math.inf
    max_num_batched_tokens: float = 8192


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a pool: how fast it is and what it holds."""

    curve: Curve
    limits: PoolLimits = PoolLimits()


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of each of the two pools."""

    prefill: Pool
    decode: Pool


def attainment(mix: Mix, pools: Pools, slo: SloConfig, split: Split) -> Attainment:
    """Return what one split is predicted to give."""
    return attainments(mix, pools, slo, [split])[0]


def every_split(mix: Mix, pools: Pools, slo: SloConfig, total: int) -> tuple[Attainment, ...]:
    """Return what every split of so many workers is predicted to give, fewest prefill workers first.

    Raises:  GameError for fewer than two workers: each pool has one.
    """
    if total < 2:
        raise GameError("total", total, ">= 2")
    return attainments(mix, pools, slo, [Split(prefill, total - prefill) for prefill in range(1, total)])


def attainments(mix: Mix, pools: Pools, slo: SloConfig, splits: Sequence[Split]) -> tuple[Attainment, ...]:
    """Return what each split is predicted to give, of any number of workers; all at once.

        ttft = wait for a prefill worker + own pass + wait for a place to decode + one iteration
        itl  = an iteration among those that run beside it, mean over its stay
        goodput = rate * P(ttft <= slo.ttft_s) * P(itl <= slo.itl_s)

    Raises:  GameError for a pool without workers, or curves that say that work takes no time.
    """
    for split in splits:
        if min(split.prefill, split.decode) < 1:
            raise GameError("split", str(split), "with a worker in either pool")
    model = _Model(mix, pools, slo)
    workers = np.array([[split.prefill] for split in splits], dtype=np.float64)
    beside = np.array([[split.decode] for split in splits], dtype=np.float64)
    ttft, itl, rate = model.fractions(workers, beside)
    return tuple(
        Attainment(split=split, ttft_frac=t, itl_frac=i, goodput_rps=r * t * i)
        for split, t, i, r in zip(splits, ttft.tolist(), itl.tolist(), rate.tolist(), strict=True)
    )


def best_split(every: Sequence[Attainment]) -> Attainment:
    """Return the split with the most goodput: the social optimum."""
    return max(every, key=lambda one: one.goodput_rps)


def equilibrium(every: Sequence[Attainment]) -> Attainment:
    """Return the variational equilibrium: where one worker more gains either pool the same attainment.

    Found by bisection on the difference of the two marginals, which falls where both attainments are concave.
    Where both are alike in it, as where neither pool is short, the split with more goodput; where that is
    alike too, as where a pool attains nothing either way, the pool that attains less gets more.

    Args:     every: `every_split`'s, fewest prefill workers first.
    """
    low, high = 0, len(every) - 1
    while low < high:
        middle = (low + high) // 2
        if _prefill_wants(every[middle], every[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return every[low]


def _prefill_wants(here: Attainment, there: Attainment) -> bool:
    """Tell whether a worker more in the prefill pool gains it more than the decode pool loses by it."""
    gains, loses = there.ttft_frac - here.ttft_frac, here.itl_frac - there.itl_frac
    if abs(gains - loses) > LIKE_FRAC:
        return gains > loses
    if here.goodput_rps != there.goodput_rps:
        return there.goodput_rps > here.goodput_rps
    return here.ttft_frac < here.itl_frac


def price_of_anarchy(now: Attainment, best: Attainment) -> float | None:
    """Return the present split's cost over the best one's, each 1 / goodput; None where next to infinite."""
    if now.goodput_rps <= LEAST_FRAC * best.goodput_rps:
        return None
    return max(best.goodput_rps / now.goodput_rps, 1.0)


class _Model:
    """What is asked, on these workers."""

    def __init__(self, mix: Mix, pools: Pools, slo: SloConfig) -> None:
        self._mix, self._slo = mix, slo
        prefill, limits = pools.prefill.curve, pools.prefill.limits
        lengths = mix.prompts()
        passes = np.ceil(lengths / limits.max_num_batched_tokens)
        self._own_s = passes * prefill.prefill_base_s + prefill.prefill_token_s * lengths
        if not self._own_s.min() > 0:
            raise GameError("prefill curve", prefill, "of prompts that take time")
        if not pools.decode.curve.decode_base_s + pools.decode.curve.decode_request_s > 0:
            raise GameError("decode curve", pools.decode.curve, "of iterations that take time")
        self._prefill = queues.Prefill(
            tokens_s=prefill.prefill_token_s * mix.uncached_tokens,
            base_s=prefill.prefill_base_s,
            passes=float(max(mix.uncached_tokens / limits.max_num_batched_tokens, 1 / limits.max_num_seqs)),
            alone=float(passes.mean()),
            spread=(1 + float(self._own_s.var() / self._own_s.mean() ** 2)) / 2,
        )
        holds = pools.decode.limits
        self._decode = queues.Decode(
            curve=pools.decode.curve,
            iterations=max(mix.output_tokens, 1.0),
            context_tokens=mix.context_tokens,
            spread=max(mix.context_squared / mix.context_tokens**2, 1.0),
            kv_tokens=holds.kv_tokens,
            most=max(min(holds.max_num_seqs, holds.kv_tokens / mix.context_tokens), 1.0),
        )

    def fractions(self, workers: Floats, beside: Floats) -> tuple[Floats, Floats, Floats]:
        """Return shares of requests within either objective and the rate that goes through, of each split."""
        mix, prefill, decode = self._mix, self._prefill, self._decode
        if mix.users:
            seen = queues.closed(mix.users, mix.think_s, prefill, decode, workers, beside)
        else:
            seen = queues.opened(mix.arrival_rps, mix.horizon_s, prefill, decode, workers, beside)
        ttft = np.array([self._within(each, seen, row) for row, each in enumerate(workers[:, 0].tolist())])
        step_s = decode.step_s(beside, seen.decode)
        mean_s = (step_s * seen.running).sum(axis=1, keepdims=True)
        room_s = self._slo.itl_s - (mean_s + STAY_FRAC * (step_s - mean_s))
        itl = (ndtr(room_s / np.maximum(STAY_FRAC * seen.varies_s, _SURELY_S)) * seen.running).sum(axis=1)
        return ttft, itl, seen.rate_rps

    def _within(self, workers: float, seen: queues.Populations, row: int) -> float:
        """Return the share of one split's requests whose first token comes in time."""
        order = np.argsort(seen.delay_s[row], kind="stable")
        middles = (np.arange(DELAYS) + 0.5) / DELAYS
        at = np.searchsorted(np.cumsum(seen.running[row, order]), middles).clip(max=len(order) - 1)
        left_s = self._slo.ttft_s - self._own_s[:, None] - seen.delay_s[row, order][at]
        times_s = np.linspace(0.0, self._slo.ttft_s, INSTANTS)
        blind = float(seen.blind[row, 0])
        within = queues.waited(self._prefill, blind, workers, seen.prefill[row], seen.arriving[row], times_s)
        return float((np.interp(left_s, times_s, within) * (left_s >= 0)).mean())
