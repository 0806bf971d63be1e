"""How fast a recording's workers were, told at a load that they all can be compared at.

Owns: the load that is typical of a pool, the records of workers and pools that reports show.
Does not own: the models (latency.py), which passes there were (playback.py).
Invariant: everything is in seconds; worker ids are text, because JSON rounds them.
"""

import statistics
from collections.abc import Iterable

import msgspec

from dynamo_poa.latency import iteration_s, prefill_s
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import ForwardPass


class WorkerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One worker rank at the end of the recording.

    samples:        forward passes behind its curve, each counting half after the half-life
    prefill_s:      predicted, of a pass with its pool's typical prompt tokens; None where the pool has none
    iteration_s:    predicted, of a decode pass with its pool's typical requests; likewise
    residual_frac:  error of its curve over its passes, as a share of the time they took
    factor:         its time over its pool's median worker's at the same load
    """

    worker_id: str
    dp_rank: int
    role: Role
    samples: float
    curve: Curve
    prefill_s: float | None
    iteration_s: float | None
    residual_frac: float | None
    factor: float | None
    straggler: bool


class PoolSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role.

    passes:              with work in them
    prefill_tokens:      of a pass that computed prompts, mean; None without one
    decode_requests, decode_kv_tokens:  of a pass that decoded, mean
    prefill_s, iteration_s:  predicted for the median worker at that load
    """

    role: Role
    workers: int
    passes: int
    prefill_tokens: float | None
    decode_requests: float | None
    decode_kv_tokens: float | None
    prefill_s: float | None
    iteration_s: float | None


class _Load:
    """The mean load of a pool's passes."""

    def __init__(self) -> None:
        self.passes = self.prefills = self.decodes = 0
        self._tokens = self._requests = self._kv_tokens = 0

    def add(self, done: ForwardPass) -> None:
        self.passes += done.prefill_tokens > 0 or done.decode_requests > 0
        self.prefills += done.prefill_tokens > 0
        self.decodes += done.decode_requests > 0
        self._tokens += done.prefill_tokens
        self._requests += done.decode_requests
        self._kv_tokens += done.decode_kv_tokens

    @property
    def prefill_tokens(self) -> float | None:
        return self._tokens / self.prefills if self.prefills else None

    @property
    def decode_requests(self) -> float | None:
        return self._requests / self.decodes if self.decodes else None

    @property
    def decode_kv_tokens(self) -> float | None:
        return self._kv_tokens / self.decodes if self.decodes else None


class Speeds:
    """Collects the passes of a recording."""

    def __init__(self) -> None:
        self._loads: dict[Role, _Load] = {}
        self._cards: dict[int, WorkerCard] = {}

    def take_pass(self, key: WorkerKey, card: WorkerCard, done: ForwardPass, at_s: float) -> None:
        """Take in one forward pass."""
        self._loads.setdefault(card.role, _Load()).add(done)
        self._cards[key.worker_id] = card

    def workers(self, latencies: Iterable[WorkerLatency]) -> tuple[WorkerSpeed, ...]:
        """Return every worker whose speed is known, by role and id."""
        known = sorted(latencies, key=lambda latency: (latency.role, latency.key))
        return tuple(self._worker(latency, self._loads.get(latency.role, _Load())) for latency in known)

    def pools(self, workers: Iterable[WorkerSpeed]) -> tuple[PoolSpeed, ...]:
        """Return the pools of these workers."""
        by_role: dict[Role, list[WorkerSpeed]] = {}
        for worker in workers:
            by_role.setdefault(worker.role, []).append(worker)
        return tuple(self._pool(role, members) for role, members in by_role.items())

    def _pool(self, role: Role, members: list[WorkerSpeed]) -> PoolSpeed:
        load = self._loads.get(role, _Load())
        return PoolSpeed(
            role=role,
            workers=len(members),
            passes=load.passes,
            prefill_tokens=load.prefill_tokens,
            decode_requests=load.decode_requests,
            decode_kv_tokens=load.decode_kv_tokens,
            prefill_s=_median(worker.prefill_s for worker in members),
            iteration_s=_median(worker.iteration_s for worker in members),
        )

    def _worker(self, latency: WorkerLatency, load: _Load) -> WorkerSpeed:
        tokens, requests, kv_tokens = load.prefill_tokens, load.decode_requests, load.decode_kv_tokens
        prefill = None if tokens is None else float(prefill_s(latency.curve, tokens))
        iteration = None
        if requests is not None and kv_tokens is not None:
            kv_frac = kv_tokens / self._kv_capacity_tokens(latency.key)
            iteration = float(iteration_s(latency.curve, requests, kv_tokens, kv_frac))
        return WorkerSpeed(
            worker_id=str(latency.key.worker_id),
            dp_rank=latency.key.dp_rank,
            role=latency.role,
            samples=latency.samples,
            curve=latency.curve,
            prefill_s=prefill,
            iteration_s=iteration,
            residual_frac=latency.residual_frac,
            factor=latency.factor,
            straggler=latency.straggler,
        )

    def _kv_capacity_tokens(self, key: WorkerKey) -> float:
        card = self._cards.get(key.worker_id)
        if card is None or not card.total_kv_blocks:
            return float("inf")
        return card.total_kv_blocks * card.kv_block_size


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None
