"""How long a worker's next forward pass will take, learnt from those it has done.

Owns: which passes count for whom and how much, what a pool lends its workers, when a worker's speed has
      changed, which worker is a straggler.
Does not own: which passes there were (fleet.py), the fit itself (fitting.py), what a prediction is used for.
Invariant: nobody's curve is made up: where a pool never had a pass, its workers have none; memory is bounded
           by the workers present at the last fit.
Source: theory.md, Latency models: recursive least squares with forgetting and a pool's prior.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dynamo_poa.fitting import (
    MIN_PASS_S,
    NO_PASSES,
    TERMS,
    FloatArray,
    Sums,
    curve_of,
    levels,
    pressure,
    rows_of,
    slowed,
)
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import ForwardPass

Amount = TypeVar("Amount", float, FloatArray)

PRIOR_PASSES = 5.0  # what the pool's word is worth beside a worker's own passes
POOL_RIDGE_FRAC = 1e-6  # keeps the pool's curve where it was in directions its passes say nothing of
POOL_ROUNDS = 3  # a pool's curve and its workers' levels are found in turns; the next fit goes on from there
ENOUGH_PASSES = 8  # to compare a worker with others, or with what it was
FORGOTTEN_PASSES = 1e-3  # less than this is no evidence
MAX_PENDING = 4096  # passes of a worker between two fits; a pass takes a millisecond, fits are a second apart

CHANGE_S = 4.0  # passes are of late for so long
FITTING_FRAC = 0.1  # when a curve fitted to all passes errs more on those of late ...
CHANGE_SHARE = 0.75  # ... and so many of them ...
CHANGE_FACTOR = 1.25  # ... are off the curve of those before by so much to one side, there is a change
CARRIED_PASSES = 10.0  # what all passes before a change are worth after it
UNFITTING_FRAC = 0.25  # they are brought to the new speed when a curve fitted to all then errs more on them


def prefill_s(curve: Curve, tokens: Amount) -> Amount:
    """Return how long it takes to compute so many prompt tokens, in seconds; 0 for none."""
    return (tokens > 0) * (curve.prefill_base_s + curve.prefill_token_s * tokens)


def iteration_s(curve: Curve, requests: Amount, kv_tokens: Amount, kv_frac: Amount | float = 0.0) -> Amount:
    """Return how long a decode pass takes with so many requests and resident KV tokens, in seconds."""
    result: Amount = (requests > 0) * (
        curve.decode_base_s
        + curve.decode_request_s * requests
        + curve.decode_kv_token_s * kv_tokens
        + curve.pressure_s * pressure(kv_frac)
    )
    return result


class _Pool(NamedTuple):
    """A pool's curve, and what one pass at the pool's speed says of each term."""

    terms: FloatArray
    squares: FloatArray

    def drawn(self, own: Sums, level: float) -> FloatArray:
        """Return a worker's curve: what its passes say, drawn to the pool's curve at the worker's level."""
        return own.solved(PRIOR_PASSES / level**2 * self.squares, level * self.terms)


class _Worker:
    """One rank: its passes of late one by one, older ones as sums, its curve and level."""

    def __init__(self, card: WorkerCard, half_life_s: float) -> None:
        self.card = card
        total_kv_blocks = card.total_kv_blocks
        self.kv_capacity_tokens = total_kv_blocks * card.kv_block_size if total_kv_blocks else math.inf
        # Receipt, wall time, prefill tokens, decode requests, their KV tokens, use of the KV cache.
        self.pending: deque[tuple[float, ...]] = deque(maxlen=MAX_PENDING)
        self.terms = np.zeros(TERMS)
        self.level = 1.0  # time taken over time by the pool's curve
        self.factor: float | None = None
        self.sums = NO_PASSES
        self._half_life_s = half_life_s
        self._at_s = -math.inf
        self._older = NO_PASSES
        self._late_at_s = np.zeros(0)
        self._late = np.zeros((0, TERMS + 1))

    def take_pending(self, at_s: float) -> None:
        """Take the new passes, let those no longer of late join the older ones, and sum them all."""
        if taken := [self.pending.popleft() for _ in range(len(self.pending))]:
            received_at_s, *columns = np.array(taken).T
            self._late_at_s = np.concatenate((self._late_at_s, received_at_s))
            self._late = np.concatenate((self._late, rows_of(*columns)))
        decay = 0.5 ** ((at_s - self._at_s) / self._half_life_s)
        self._at_s = at_s
        gone = int(np.searchsorted(self._late_at_s, at_s - CHANGE_S))
        gone = max(0, min(gone, len(self._late) - ENOUGH_PASSES))
        self._older = self._older.weighted(decay).plus(self._summed(slice(0, gone)))
        self._late_at_s, self._late = self._late_at_s[gone:], self._late[gone:]
        self.sums = self._older.plus(self._summed(slice(None)))

    def take_change(self, pool: _Pool) -> bool:
        """Tell whether the passes of late are unlike those before, which then count little.

        When those before do not fit beside them even so, it is the speed that has changed: they are brought
        to the new one. Otherwise it is the load: real engines are not quite linear in it.
        """
        if min(len(self._late), self._older.passes) < ENOUGH_PASSES:
            return False
        if np.median(np.abs(np.log(self._late_ratios(self.terms)))) < FITTING_FRAC:
            return False
        ratios = self._late_ratios(pool.drawn(self._older, self._older.level(pool.terms)))
        change = float(np.median(ratios))
        off = ratios > CHANGE_FACTOR if change > 1 else ratios < 1 / CHANGE_FACTOR
        if np.mean(off) < CHANGE_SHARE:
            return False
        self._late_at_s, self._late = self._late_at_s[off], self._late[off]
        late = self._summed(slice(None))
        self._older = self._older.weighted(min(1.0, CARRIED_PASSES / self._older.passes))
        if self._older.residual_frac(pool.drawn(self._older.plus(late), self.level)) > UNFITTING_FRAC:
            self._older = self._older.slowed(change)
        self.sums = self._older.plus(late)
        return True

    def _late_ratios(self, terms: FloatArray) -> FloatArray:
        return self._late[:, TERMS] / np.maximum(self._late[:, :TERMS] @ terms, MIN_PASS_S)

    def _summed(self, which: slice) -> Sums:
        weights = 0.5 ** ((self._at_s - self._late_at_s[which]) / self._half_life_s)
        return Sums.of(self._late[which], weights, self.terms)


class LatencyBook:
    """The latency models of all workers. Instants are on the monotonic clock, of receipt.

    unmeasured:  passes with work and a wall time of 0, which is no duration: not taken
    """

    def __init__(self, *, half_life_s: float = 60.0, straggler_factor: float = 2.0) -> None:
        """Start without any passes.

        Args:  half_life_s: after so long a pass counts half; straggler_factor: times as slow as its pool.
        """
        self.unmeasured = 0
        self._half_life_s = half_life_s
        self._straggler_factor = straggler_factor
        self._workers: dict[WorkerKey, _Worker] = {}
        self._pools: dict[Role, FloatArray] = {}  # kept when all workers of a role have gone: others follow

    def observe(self, key: WorkerKey, card: WorkerCard, done: ForwardPass, at_s: float) -> None:
        """Note a pass; a worker with another role or cache than before begins anew."""
        tokens, requests, kv_tokens = done.prefill_tokens, done.decode_requests, done.decode_kv_tokens
        if not (tokens or requests):
            return
        if not done.wall_time_s:
            self.unmeasured += 1
            return
        worker = self._workers.get(key)
        if worker is None or worker.card is not card:
            worker = self._with_card(key, card)
        worker.pending.append(
            (at_s, done.wall_time_s, tokens, requests, kv_tokens, kv_tokens / worker.kv_capacity_tokens)
        )

    def forget(self, key: WorkerKey) -> None:
        """Let a rank begin anew, because it was restarted."""
        self._workers.pop(key, None)

    def fit(self, at_s: float, present: Iterable[tuple[WorkerKey, Role]]) -> dict[WorkerKey, WorkerLatency]:
        """Return what is known of each present worker's speed, and forget the absent; once a second or so.

        Passes may be noted meanwhile in another thread.

        Returns:  a worker without passes has its pool's curve; absent where its pool never had a pass.
        """
        roles, pools = dict(present), dict[Role, list[_Worker]]()
        for key, worker in list(self._workers.items()):
            if roles.get(key) is not worker.card.role:
                self._workers.pop(key, None)
                continue
            worker.take_pending(at_s)
            if worker.sums.passes > FORGOTTEN_PASSES:
                pools.setdefault(worker.card.role, []).append(worker)
        for role, members in pools.items():
            self._fit_pool(role, members)
        return {
            key: self._latency(key, role, self._workers.get(key))
            for key, role in roles.items()
            if role in self._pools
        }

    def pool_curves(self) -> dict[Role, Curve]:
        """Return each pool's curve: that of a worker of which nothing else is known."""
        return {role: curve_of(terms) for role, terms in dict(self._pools).items()}

    def _with_card(self, key: WorkerKey, card: WorkerCard) -> _Worker:
        worker = self._workers.get(key)
        if worker is None or _shape(worker.card) != _shape(card):
            worker = self._workers[key] = _Worker(card, self._half_life_s)
        worker.card = card
        return worker

    def _fit_pool(self, role: Role, members: Sequence[_Worker]) -> None:
        """Bring the curves of a pool and its members up to date; again when somebody's speed has changed."""
        for _ in range(2):
            pool = _pool_of(members, self._pools.get(role))
            self._pools[role] = pool.terms
            for worker in members:
                worker.terms = pool.drawn(worker.sums, worker.level)
            changes = [worker.take_change(pool) for worker in members]
            if not any(changes):
                return

    def _latency(self, key: WorkerKey, role: Role, worker: _Worker | None) -> WorkerLatency:
        if worker is None or worker.sums.passes <= FORGOTTEN_PASSES:
            return WorkerLatency(key=key, role=role, curve=curve_of(self._pools[role]))
        return WorkerLatency(
            key=key,
            role=role,
            curve=curve_of(worker.terms),
            samples=worker.sums.passes,
            residual_frac=worker.sums.residual_frac(worker.terms),
            factor=worker.factor,
            straggler=worker.factor is not None and worker.factor > self._straggler_factor,
        )


def _pool_of(members: Sequence[_Worker], before: FloatArray | None) -> _Pool:
    """Fit a pool's curve to all passes, each worker's brought to the pool's speed; set levels and factors.

        level = time taken / time by the pool's curve, over the worker's own passes; the pool's median has 1

    Of an even number the lower middle is the median: of two workers the slower is the one to name.
    """
    terms = np.zeros(TERMS) if before is None else before
    grams = np.stack([worker.sums.gram for worker in members])
    passes = np.array([worker.sums.passes for worker in members])
    level = np.array([worker.level for worker in members])
    measured = passes >= ENOUGH_PASSES
    # A worker's very first pass may be slow for reasons of its own.
    trust = np.minimum(1.0, passes / ENOUGH_PASSES)
    for _ in range(POOL_ROUNDS):
        sums = Sums(slowed(grams, 1 / level).sum(axis=0), float(passes.sum()))
        terms = sums.solved(POOL_RIDGE_FRAC * sums.squares, terms)
        level = levels(grams, terms)
        level = (level / statistics.median_low(level[measured] if measured.any() else level)) ** trust
    comparable = measured & (measured.sum() > 1)
    for worker, own, compares in zip(members, level.tolist(), comparable.tolist(), strict=True):
        worker.level, worker.factor = own, own if compares else None
    return _Pool(terms, sums.squares / sums.passes)


def _shape(card: WorkerCard) -> tuple[Role, int, int | None]:
    return card.role, card.kv_block_size, card.total_kv_blocks
