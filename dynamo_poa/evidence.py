"""What the workers' own figures say of how loaded they and their pool are.

Owns: turning queued tokens into seconds of work, the unit in which queues are compared, demand against
      capacity, the share of KV blocks and slots in use, iteration time; for each rank and for its pool.
Does not own: thresholds' memory, confirmation and hysteresis (pressure.py); curves (latency.py).
Invariant: pure; what is unknown is None and no evidence. A figure of a pool is that of its ranks together,
           and one rank that stands out does not make it.
Source: paper section 5.2 (the pools saturate on different resources); the queue's unit: see `Service`.
"""

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from dynamo_poa.load import WorkerState
from dynamo_poa.values import Curve, Role, WorkerKey, WorkerLatency

IDLE_BUSY_FRAC = 0.5  # theory: at half load an M/G/m pool has next to no queue
SPREAD = 1.5  # E[s^2]/E[s]^2 assumed where sizes are not known: between equal prompts (1) and exponential (2)
KNOWN_FRAC = 0.5  # fewer ranks that say what they have queued do not speak for their pool


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What callers ask for, as decisions.Traffic has it; None is unknown. Tokens are those to be computed."""

    arrival_rate: float | None = None
    tokens_mean: float | None = None
    tokens_effective: float | None = None
    arrived: int | None = None


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """How long the pool's median rank takes for one request's prefill.

    mean_s:       E[s]
    effective_s:  E[s^2] / E[s]; over the number of ranks it is the unit of a pool's queue: with Poisson
                  arrivals at utilisation ρ < 1 work queued beyond x units has a chance of about
                  exp(-2 x (1 - ρ) / ρ), and at ρ > 1 it grows without end

    Source:  heavy-traffic limit of the M/G/1 queue (Kingman 1962); measured: bench `detection`.
    """

    mean_s: float
    effective_s: float


class RankReading(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `slots_frac`: running requests over max_num_seqs."""

    key: WorkerKey
    queue_s: float | None = None
    queued: int | None = None
    kv_frac: float | None = None
    slots_frac: float | None = None
    iteration_s: float | None = None


class PoolReading(msgspec.Struct, frozen=True, kw_only=True):
    """One pool.

    queue_s:      work queued, mean over ranks; a rank's counts up to twice the median rank's and one request
    unit_s:       unit of that queue, None without a curve or any size of requests
    service_s:    effective service time: the unit for a single rank
    request_s:    mean service time over the number of ranks: what one arrival adds to the mean queue; None
                  where prefill is not all the work
    rate, arrived:  arrivals per second, and in all; None likewise
    queued, queued_median:   requests queued, in all and at the (lower) median rank
    iteration_s:  of decode-only passes, (lower) median over ranks
    known:        every rank says what it has queued, in seconds where it prefills
    idle:         known, next to nothing queued, and ranks that prefill are half idle
    unloaded:     known to run at most one request a rank
    """

    role: Role
    ranks: tuple[RankReading, ...] = ()
    queue_s: float | None = None
    unit_s: float | None = None
    service_s: float | None = None
    request_s: float | None = None
    rate: float | None = None
    arrived: int | None = None
    busy_frac: float | None = None
    queued: int | None = None
    queued_median: int | None = None
    kv_frac: float | None = None
    slots_frac: float | None = None
    iteration_s: float | None = None
    known: bool = False
    idle: bool = False
    unloaded: bool = False


def read_pools(
    workers: Iterable[WorkerState], latencies: Mapping[WorkerKey, WorkerLatency], demand: Demand
) -> dict[Role, PoolReading]:
    """Return what each pool's ranks say together."""
    by_role: dict[Role, list[WorkerState]] = {}
    for worker in workers:
        by_role.setdefault(worker.card.role, []).append(worker)
    return {role: _read_pool(role, of_role, latencies, demand) for role, of_role in by_role.items()}


def queue_s(worker: WorkerState, curve: Curve | None) -> float | None:
    """Return the seconds until what the engine has queued for prefill would be done, None when unknown.

        tokens * prefill_token_s + requests * prefill_base_s,   tokens = min(queued, booked by routers)

    Engines count raw prompt tokens, cached ones included, so this bounds from above; what routers have booked
    there leaves out cached tokens and includes what is being computed: the least of both is the better bound.
    """
    queued, requests = worker.queued_prefill_tokens, worker.queued_requests
    if queued is None or requests is None:
        return None
    if queued == 0:
        return 0.0
    if curve is None or curve.prefill_token_s + curve.prefill_base_s <= 0:
        return None
    booked = worker.active_prefill_tokens
    tokens = queued if booked is None else min(queued, booked)
    return tokens * curve.prefill_token_s + requests * curve.prefill_base_s


def service(curves: Iterable[Curve], mean: float | None, effective: float | None) -> Service | None:
    """Return a request's prefill time at the (lower) median rank.

        E[s] = base + token * E[u]     E[s^2] = base^2 + 2 base token E[u] + token^2 E[u^2]

    Args:  mean: E[u] tokens.  effective: E[u^2] / E[u]; a spread of SPREAD is assumed without it.
    """
    if mean is None or mean <= 0:
        return None
    able = [curve for curve in curves if curve.prefill_token_s + curve.prefill_base_s > 0]
    if not able:
        return None
    by_time = sorted(able, key=lambda curve: curve.prefill_base_s + curve.prefill_token_s * mean)
    median = by_time[(len(by_time) - 1) // 2]
    base_s, token_s = median.prefill_base_s, median.prefill_token_s
    square_tokens = mean * (SPREAD * mean if effective is None else effective)
    mean_s = base_s + token_s * mean
    square = base_s**2 + 2 * base_s * token_s * mean + token_s**2 * square_tokens
    return Service(mean_s=mean_s, effective_s=square / mean_s)


def _read_pool(
    role: Role, workers: list[WorkerState], latencies: Mapping[WorkerKey, WorkerLatency], demand: Demand
) -> PoolReading:
    ranks = tuple(_read_rank(worker, latencies) for worker in workers)
    curves = [latencies[worker.key].curve for worker in workers if worker.key in latencies]
    size = demand.tokens_mean
    if size is None:  # what is queued is a sample of the requests
        tokens = sum(worker.queued_prefill_tokens or 0 for worker in workers)
        size = tokens / max(sum(worker.queued_requests or 0 for worker in workers), 1)
    of_request = service(curves, size, demand.tokens_effective)
    queues_s = sorted(rank.queue_s for rank in ranks if rank.queue_s is not None)
    queued = sorted(rank.queued for rank in ranks if rank.queued is not None)
    enough = len(queued) >= KNOWN_FRAC * len(ranks)
    busy = [worker.busy_frac for worker in workers if worker.busy_frac is not None]
    running = [count for worker in workers if (count := _running(worker)) is not None]
    known = len(queued) == len(ranks) and (role is Role.DECODE or len(queues_s) == len(ranks))
    counts = role is Role.PREFILL and demand.tokens_mean is not None
    at_rest = role is Role.DECODE or (len(busy) == len(ranks) and _mean(busy) < IDLE_BUSY_FRAC)
    return PoolReading(
        role=role,
        ranks=ranks,
        queue_s=_pooled(queues_s, of_request) if enough and queues_s else None,
        unit_s=None if of_request is None else of_request.effective_s / len(ranks),
        service_s=None if of_request is None else of_request.effective_s,
        request_s=of_request.mean_s / len(ranks) if of_request is not None and counts else None,
        rate=demand.arrival_rate if counts else None,
        arrived=demand.arrived if counts else None,
        busy_frac=_mean(busy) if len(busy) == len(ranks) else None,
        queued=sum(queued) if enough else None,
        queued_median=queued[(len(queued) - 1) // 2] if enough and queued else None,
        kv_frac=_share((w.kv_used_blocks, w.card.total_kv_blocks) for w in workers),
        slots_frac=_share((_running(w), w.card.max_num_seqs) for w in workers),
        iteration_s=_median_low(rank.iteration_s for rank in ranks),
        known=known,
        idle=known and at_rest and sum(queued) <= len(ranks) / 2,
        unloaded=len(running) == len(ranks) and sum(running) <= len(ranks),
    )


def _read_rank(worker: WorkerState, latencies: Mapping[WorkerKey, WorkerLatency]) -> RankReading:
    latency = latencies.get(worker.key)
    running, slots = _running(worker), worker.card.max_num_seqs
    return RankReading(
        key=worker.key,
        queue_s=queue_s(worker, None if latency is None else latency.curve),
        queued=worker.queued_requests,
        kv_frac=worker.kv_used_frac,
        slots_frac=running / slots if running is not None and slots else None,
        iteration_s=worker.iteration_s,
    )


def _running(worker: WorkerState) -> int | None:
    prefill, decode = worker.running_prefill_requests, worker.running_decode_requests
    return None if prefill is None or decode is None else prefill + decode


def _pooled(queues_s: list[float], of_request: Service | None) -> float:
    """Return the mean queue, in which a rank that stands out counts for little more than the median one."""
    median_s = queues_s[(len(queues_s) - 1) // 2]
    most_s = 2 * median_s + (0.0 if of_request is None else of_request.effective_s)
    return _mean([min(one_s, most_s) for one_s in queues_s])


def _share(pairs: Iterable[tuple[int | None, int | None]]) -> float | None:
    known = [(used, total) for used, total in pairs if used is not None and total]
    return sum(used for used, _ in known) / sum(total for _, total in known) if known else None


def _median_low(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
