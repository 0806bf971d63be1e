"""Where the cost beyond an unloaded system comes from: routing, caching or capacity.

Owns: what each of the two slow games found, the record that carries all three, which one dominates and what
      would help.
Does not own: the games (games/), how the estimates come about (placement.py, split.py, estimator.py).
Invariant: absent is None with a reason, never 1.0 and never NaN; pure.
Source: theory.md, Γ_R (decomposition), Γ_KV, Γ_PD; paper, the three coupled games.
"""

from collections.abc import Collection

import msgspec

from dynamo_poa.values import Estimate, Shares

WORTH_FRAC = 0.01  # of goodput: less than that another worker is no help
KEPT_FRAC = 0.95  # of requests within an objective: it is kept
HUNDREDFOLD = 99.0  # of a gain, as a share
DOMINANT_FRAC = 0.5  # a cause dominates with more than half of the cost beyond the unloaded


class CacheSwap(msgspec.Struct, frozen=True, kw_only=True):
    """How the caches followed a change of setting: the router leads, caches follow (Stackelberg).

    at_s:               epoch, of the change
    overlap_weight_*:   ω before and after
    hit_frac_*:         share of prompt tokens found cached: before the change, while caches turn over, and
                        once as many blocks were stored as the pool holds or SETTLED_S have passed; None where
                        there were too few requests, or not yet
    duplication_*:      copies a distinct block has, before and after
    """

    at_s: float
    overlap_weight_before: float
    overlap_weight_after: float
    hit_frac_before: float | None = None
    hit_frac_during: float | None = None
    hit_frac_after: float | None = None
    duplication_before: float | None = None
    duplication_after: float | None = None


class CachingEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Γ_KV: what the observed placement of prefixes costs over the best one, or why that is not known.

    poa_hat:          observed / optimal; None when absent, also where the optimum costs nothing
    observed_s, optimal_s:  GPU seconds spent per second on fetching and recomputing prefixes
    bound_s:          no placement costs less; within 0.1 % of optimal_s under `exact`
    method:           how the optimum was found: `exact` (MILP, proven to 0.1 %) or `greedy` (unproven, saves
                      half of the most at least; poa_hat is then a lower estimate, observed / bound the upper)
    groups, workers:  size of the instance: prefix groups that were asked for and where they part, and ranks
    uncertain:        events of at least one cache were missed: what it holds is approximate
    duplication:      copies a distinct resident block has, mean, >= 1
    copies_frac:      share of capacity that holds blocks which another worker of the same node holds, too
    shared_hits_frac: share of prefix hits, in blocks, that another worker's copy serves (free-riding); by the
                      demand seen
    reload_frac:      share of evicted blocks that were stored again within reload_s: asked for again
    sampled_frac:     share of resident blocks that duplication was counted on; 1.0 is all
    """

    poa_hat: float | None = None
    reason: str = ""
    observed_s: float | None = None
    optimal_s: float | None = None
    bound_s: float | None = None
    method: str = ""
    groups: int = 0
    workers: int = 0
    uncertain: bool = False
    duplication: float | None = None
    copies_frac: float | None = None
    shared_hits_frac: float | None = None
    reload_frac: float | None = None
    sampled_frac: float | None = None


class Split(msgspec.Struct, frozen=True, order=True):
    """How many workers prefill and how many decode."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        """Return it as the field writes it."""
        return f"{self.prefill}P/{self.decode}D"


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """What a split is predicted to give.

    ttft_frac, itl_frac:  share of requests within the objective
    goodput_rps:          requests a second within both
    """

    split: Split
    ttft_frac: float
    itl_frac: float
    goodput_rps: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change of split that is better beyond noise and has been for `held_s`.

    now, then:            what the present split and the advised one are predicted to give
    gain_frac:            goodput gained, as a share of the present split's
    gain_low, gain_high:  its 95 % interval
    """

    now: Attainment
    then: Attainment
    gain_frac: float
    gain_low: float
    gain_high: float
    held_s: float = 0.0

    def __str__(self) -> str:
        """Return it as an operator reads it."""
        ttft = f"TTFT attainment {self.now.ttft_frac * 100:.0f} → {self.then.ttft_frac * 100:.0f} %"
        itl = f"ITL {self.now.itl_frac * 100:.0f} → {self.then.itl_frac * 100:.0f} %"
        gain = gained(self.gain_frac, self.gain_low, self.gain_high)
        return f"{self.now.split} → {self.then.split}: {ttft}, {itl}, goodput {gain}"


def gained(gain_frac: float, low: float, high: float) -> str:
    """Return a gain of goodput and its interval in percent; beyond a hundredfold they say nothing more."""
    if low >= HUNDREDFOLD:
        return "more than a hundredfold"
    ends = [f"{end * 100:+.0f}" if end < HUNDREDFOLD else "over 10000" for end in (gain_frac, low, high)]
    return f"{ends[0]} % ({ends[1]} to {ends[2]})"


class AllocationEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Γ_PD: what the present split of workers costs over the best one, or why that is not known.

    poa_hat:        cost of the present split over that of the best one; a split costs the seconds it takes
                    to get a request done within its objectives, 1 / goodput
    best, equilibrium:  social optimum and variational equilibrium (equal marginal attainment)
    target:         the nearest split that is as good as the best, or nearly; None where the present one is
    gain_frac:      goodput gained by changing to it, as a share of the present split's
    gain_low, gain_high:  its 95 % interval, of the arrivals; the model is taken as given
    one_more_*:     goodput gained by one worker more in that pool, as a share; the other pool is left alone
    """

    poa_hat: float | None = None
    reason: str = ""
    now: Attainment | None = None
    best: Attainment | None = None
    equilibrium: Attainment | None = None
    target: Attainment | None = None
    gain_frac: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    one_more_prefill: float | None = None
    one_more_decode: float | None = None


class Coupling(msgspec.Struct, frozen=True, kw_only=True):
    """The three games at one tick.

    routing, caching, allocation:  their PoA-hat, None where absent
    shares:      of the cost beyond an unloaded system: `congestion` is routing's, `miss` caching's
    unpriced:    legs whose cost is not in the shares, and why
    dominant:    `routing`, `caching` or `capacity`; empty while none has more than half, or nothing is known
    remedy:      what would help, in words; empty without a dominant cause
    """

    routing: float | None = None
    caching: float | None = None
    allocation: float | None = None
    shares: Shares | None = None
    unpriced: dict[str, str] = {}
    dominant: str = ""
    remedy: str = ""


def couple(
    routing: Estimate,
    caching: CachingEstimate,
    allocation: AllocationEstimate,
    advice: Advice | None = None,
    *,
    driver: str = "",
    without_choice: Collection[str] = (),
) -> Coupling:
    """Put the three games side by side and say which cause dominates.

    A leg that could not be priced may hold most of the cost: then nothing dominates, unless the load is known
    to come from a leg that was priced, or from one of a single worker, where routing has no choice.

    Args:  driver: the leg that the load is on, empty where that is not known.
           without_choice: legs of one worker.
    """
    shares = routing.shares
    unpriced = {role: leg.reason for role, leg in routing.legs.items() if leg.poa_hat is None}
    if driver in without_choice:
        dominant = "capacity"
    elif shares is None or (unpriced if not driver else driver in unpriced):
        dominant = ""
    else:
        dominant = _dominant(shares)
    return Coupling(
        routing=routing.poa_hat,
        caching=caching.poa_hat,
        allocation=allocation.poa_hat,
        shares=shares,
        unpriced=unpriced,
        dominant=dominant,
        remedy=_remedy(dominant, allocation, advice),
    )


def in_words(coupling: Coupling) -> str:
    """Say where the cost beyond an unloaded system comes from, and what would help."""
    shares = coupling.shares
    if shares is None:
        said = "no cost beyond that of an unloaded system is known"
    else:
        parts = f"{shares.congestion:.0%} routing, {shares.miss:.0%} caching, {shares.capacity:.0%} capacity"
        said = f"the cost beyond an unloaded system is {parts}"
    without = ", ".join(f"{role}: {reason}" for role, reason in coupling.unpriced.items())
    told = f"{said} (not in it: {without})" if without else said
    return f"{told}: {coupling.remedy}" if coupling.remedy else told


def _dominant(shares: Shares) -> str:
    by_cause = {"routing": shares.congestion, "caching": shares.miss, "capacity": shares.capacity}
    cause = max(by_cause, key=lambda name: by_cause[name])
    return cause if by_cause[cause] > DOMINANT_FRAC else ""


def _remedy(dominant: str, allocation: AllocationEstimate, advice: Advice | None) -> str:
    if dominant == "routing":
        return "another choice of workers: the policy's to find"
    if dominant == "caching":
        return "more cache affinity, or more cache"
    if dominant != "capacity":
        return ""
    if advice is not None:
        return f"no routing parameter can help; {advice}"
    more = {"prefill": allocation.one_more_prefill, "decode": allocation.one_more_decode}
    known = {pool: gain for pool, gain in more.items() if gain is not None}
    pool = max(known, key=lambda name: known[name], default="")
    if known.get(pool, 0.0) < WORTH_FRAC:
        now = allocation.now
        if now is None or min(now.ttft_frac, now.itl_frac) < KEPT_FRAC:
            return "no routing parameter can help; more workers or fewer requests would"
        return (
            "no routing parameter can help; more workers would shorten waits that are within the objectives"
        )
    return f"no routing parameter can help; one more {pool} worker would: goodput +{known[pool] * 100:.0f} %"
