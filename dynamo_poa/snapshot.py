"""Which game the requests in flight on a leg are playing at one instant, and what it costs them.

Owns: turning requests and latency models into cost arrays of the prefill and the decode game; pricing both as
      played and at best; splitting the difference into miss, congestion and capacity.
Does not own: the models (latency.py), the optimum (games/routing.py), windows of snapshots (estimator.py).
Invariant: both sides are priced by the same model, so that what is priced is placement only, and observed is
           never under optimal.
Source: theory.md, Gamma_R: snapshots, `marginal`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.flight import InFlight
from dynamo_poa.games.routing import decode_cost, decode_optimum, prefill_cost, prefill_optimum
from dynamo_poa.latency import iteration_s
from dynamo_poa.load import WorkerState
from dynamo_poa.values import Role, WorkerCard, WorkerKey, WorkerLatency

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MIN_WORKERS = 2
NO_PASS = "no forward pass of its kind heard of lately to learn its time from"
MAX_SECONDS = 1e9  # of anything in a game; more is a count that no engine has
TOO_LONG = f"a request or queue that would take more than {MAX_SECONDS:g} s: some message's count is not true"
MAX_PRICED = 512  # requests of one game; of more every other, third, ... is taken and stands for its like


class PrefillGame(NamedTuple):
    """Prompts that wait or are computed: jobs on unrelated machines.

    tokens:         `(n, m)` prompt tokens each worker would have to compute
    base_s, token_s:  `(m,)` each worker's seconds per request and per token
    backlog_s:      `(m,)` work of requests that are not ours to move
    chosen:         `(n,)` column of the worker each is on
    stands_for:     how many requests each row stands for
    """

    requests: tuple[InFlight, ...]
    tokens: Floats
    base_s: Floats
    token_s: Floats
    backlog_s: Floats
    chosen: Indices
    stands_for: float

    @property
    def alone_s(self) -> Floats:
        """Return `(n, m)`: each prompt's own time on each worker."""
        return self.base_s + self.token_s * self.tokens

    @property
    def processing_s(self) -> Floats:
        """Return `(n, m)`: what each row keeps a worker from others, for all it stands for."""
        return self.stands_for * self.alone_s


class DecodeGame(NamedTuple):
    """Requests that decode: a congestion game, in which all on a worker bear its iteration time.

    iteration_s:  `(m, n + 1)` iteration time of a worker with so many of the rows; without own context
    extra_s:      `(n, m)` what reading a request's own context adds to its iteration
    chosen:       `(n,)` column of the worker each is on
    rounds:       iterations they have still to make, mean
    stands_for:   how many requests each row stands for
    """

    requests: tuple[InFlight, ...]
    iteration_s: Floats
    extra_s: Floats
    chosen: Indices
    rounds: float
    stands_for: float


class Snapshot(NamedTuple):
    """The requests in flight on one leg at one instant.

    lack:  why it cannot be priced; empty when it can
    """

    at_s: float
    role: Role
    workers: tuple[WorkerKey, ...] = ()
    prefill: PrefillGame | None = None
    decode: DecodeGame | None = None
    lack: str = ""

    @property
    def size(self) -> int:
        """Return how many requests it is about."""
        games = (self.prefill, self.decode)
        return round(sum(len(game.requests) * game.stands_for for game in games if game is not None))


class SnapshotPrice(NamedTuple):
    """What a snapshot costs; seconds that its requests have still to wait, summed over them.

    Prefill counts the seconds to the end of each prompt; decode the seconds of the iterations still to come.

    miss_s:  part of observed - optimal that is tokens computed again
    """

    at_s: float
    role: Role
    requests: int
    observed_s: float
    optimal_s: float
    unloaded_s: float
    miss_s: float
    lack: str = ""


def take_snapshot(
    role: Role,
    at_s: float,
    running: Sequence[InFlight],
    latencies: Mapping[WorkerKey, WorkerLatency],
    cards: Mapping[int, WorkerCard],
    foreign: Mapping[WorkerKey, float] | None = None,
) -> Snapshot:
    """Return a leg's requests as the games they play.

    Requests on a worker that is not there any more are not in the game.

    Args:  running: of this leg.  latencies: of the workers present, all roles.
           foreign: prompt tokens queued on a worker that are not those of `running`.
    """
    workers = tuple(sorted(key for key, latency in latencies.items() if latency.role is role))
    if len(workers) < MIN_WORKERS:
        present = sum(len(card.ranks) for card in cards.values() if card.role is role)
        few = f"{_many(max(present, len(workers)), 'worker')}, {MIN_WORKERS} needed"
        return Snapshot(at_s, role, workers, lack=few if present < MIN_WORKERS else NO_PASS)
    of_pool = [latencies[key] for key in workers]
    place = {key: column for column, key in enumerate(workers)}
    ours = [request for request in running if request.worker in place]
    waiting = [request for request in ours if request.decoding_since_s is None]
    decoding = [request for request in ours if request.decoding_since_s is not None]
    prefill, decode = None, None
    if role is not Role.DECODE and waiting:
        if not any(latency.curve.prefill_base_s + latency.curve.prefill_token_s for latency in of_pool):
            return Snapshot(at_s, role, workers, lack=NO_PASS)
        prefill = _prefill_game(waiting, place, of_pool, foreign or {})
    if role is not Role.PREFILL and decoding:
        if not any(
            latency.curve.decode_base_s + latency.curve.decode_request_s + latency.curve.decode_kv_token_s
            for latency in of_pool
        ):
            return Snapshot(at_s, role, workers, lack=NO_PASS)
        decode = _decode_game(at_s, decoding, place, of_pool, cards)
    if not all(_is_believable(game) for game in (prefill, decode) if game is not None):
        return Snapshot(at_s, role, workers, lack=TOO_LONG)
    return Snapshot(at_s, role, workers, prefill, decode)


def foreign_tokens(workers: Iterable[WorkerState], running: Sequence[InFlight]) -> dict[WorkerKey, float]:
    """Return the prompt tokens queued in each engine that no request of ours accounts for.

        tokens = queued tokens * (queued requests - ours there) / queued requests

    A router that does not report has put them there, or their caller has gone and the engine goes on.
    """
    ours = Counter(request.worker for request in running if request.decoding_since_s is None)
    found = {}
    for worker in workers:
        queued, tokens = worker.queued_requests or 0, worker.queued_prefill_tokens or 0
        if queued > ours[worker.key]:
            found[worker.key] = tokens * (queued - ours[worker.key]) / queued
    return found


def price(snapshot: Snapshot) -> SnapshotPrice:
    """Price a snapshot as it is and at best.

        observed >= optimal >= unloaded        miss within [0, observed - optimal]

    miss is what the placement that was made would have saved, had each request found cached on its worker
    what it would find under the best placement.
    """
    observed_s = optimal_s = unloaded_s = miss_s = 0.0
    if (game := snapshot.prefill) is not None:
        weight = game.stands_for
        observed = prefill_cost(game.processing_s, game.backlog_s, game.chosen)
        best = prefill_optimum(game.processing_s, game.backlog_s)
        optimal = min(best.cost_s, observed)  # equal but for rounding
        rows = np.arange(len(game.chosen))
        spared = game.processing_s
        tokens = np.minimum(game.tokens[rows, game.chosen], game.tokens[rows, best.workers])
        spared[rows, game.chosen] = weight * (game.base_s[game.chosen] + game.token_s[game.chosen] * tokens)
        missed = observed - prefill_cost(spared, game.backlog_s, game.chosen)
        observed_s += weight * observed
        optimal_s += weight * optimal
        unloaded_s += weight * float(game.alone_s.min(axis=1).sum())
        miss_s += weight * min(max(missed, 0.0), observed - optimal)
    if (play := snapshot.decode) is not None:
        weight = play.stands_for * play.rounds
        observed = decode_cost(play.iteration_s, play.extra_s, play.chosen)
        optimal = min(decode_optimum(play.iteration_s, play.extra_s).cost_s, observed)
        alone_s = play.extra_s + play.iteration_s[:, 1]
        observed_s += weight * observed
        optimal_s += weight * optimal
        unloaded_s += weight * float(alone_s.min(axis=1).sum())
    return SnapshotPrice(
        snapshot.at_s,
        snapshot.role,
        snapshot.size,
        observed_s,
        optimal_s,
        min(unloaded_s, optimal_s),
        miss_s,
        snapshot.lack,
    )


def _is_believable(game: PrefillGame | DecodeGame) -> bool:
    """Tell whether a game is within what its optimum takes (games/routing.py), far as that is."""
    if isinstance(game, PrefillGame):
        times_s = (game.processing_s, game.backlog_s)
    else:
        times_s = (game.iteration_s, game.extra_s)
    return all(bool(time_s.max() <= MAX_SECONDS) for time_s in times_s)


def _sample(requests: list[InFlight]) -> tuple[tuple[InFlight, ...], float]:
    """Return at most MAX_PRICED requests and how many each stands for; of each worker its fair share."""
    step = -(-len(requests) // MAX_PRICED)
    if step == 1:
        return tuple(requests), 1.0
    taken = tuple(sorted(requests, key=attrgetter("worker"))[::step])
    return taken, len(requests) / len(taken)


def _prefill_game(
    waiting: list[InFlight],
    place: Mapping[WorkerKey, int],
    of_pool: Sequence[WorkerLatency],
    foreign: Mapping[WorkerKey, float],
) -> PrefillGame:
    """Return the game of the prompts that are not done.

    Where a decision's candidates were not recorded, its prompt is taken to be cached nowhere but where it
    went: then leaving looks dear, and PoA-hat is at most what it is in truth.
    """
    requests, stands_for = _sample(waiting)
    tokens = np.empty((len(requests), len(place)))
    chosen = np.array([place[request.worker] for request in requests], dtype=np.intp)
    columns: dict[int, tuple[Indices, Indices]] = {}  # by identity: tuples of workers are shared
    for row, request in enumerate(requests):
        tokens[row] = request.prompt_tokens
        tokens[row, chosen[row]] = request.prompt_tokens - request.cached_tokens
        if request.uncached is not None:
            known = columns.get(id(request.uncached.workers))
            if known is None:
                found = [(i, place[key]) for i, key in enumerate(request.uncached.workers) if key in place]
                pairs = np.array(found, dtype=np.intp).reshape(-1, 2)
                known = columns[id(request.uncached.workers)] = (pairs[:, 0], pairs[:, 1])
            # Measured: loads with and without the prompt are asked for one after the other, so that a
            # candidate may carry the tokens of a request that was booked in between.
            uncached = np.minimum(request.uncached.tokens[known[0]], request.prompt_tokens)
            tokens[row, known[1]] = uncached
    base_s = np.array([latency.curve.prefill_base_s for latency in of_pool])
    token_s = np.array([latency.curve.prefill_token_s for latency in of_pool])
    backlog_s = token_s * np.array([foreign.get(key, 0.0) for key in place])
    # Measured: an engine computes the last token of a prompt also when all of it is cached.
    tokens = np.maximum(tokens, 1.0)
    return PrefillGame(requests, tokens, base_s, token_s, backlog_s, chosen, stands_for)


def _decode_game(
    at_s: float,
    decoding: list[InFlight],
    place: Mapping[WorkerKey, int],
    of_pool: Sequence[WorkerLatency],
    cards: Mapping[int, WorkerCard],
) -> DecodeGame:
    """Return the game of the requests that decode.

        l_w(k) = alpha + beta * k + gamma * c * (k - 1) + pressure, extra[r, w] = gamma * context of r

    with c the mean context: a request's own context is its own, its neighbours' are alike. How many tokens a
    request has generated is not reported; it is the time it has decoded over its worker's iteration time. By
    symmetry that is also how many it has still to make, on the average of all.
    """
    requests, stands_for = _sample(decoding)
    n, keys = len(requests), list(place)
    chosen = np.array([place[request.worker] for request in requests], dtype=np.intp)
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.float64)
    since_s = np.array([request.decoding_since_s for request in requests], dtype=np.float64)
    on_worker = stands_for * np.bincount(chosen, minlength=len(keys))
    kv_tokens = stands_for * np.bincount(chosen, weights=prompts, minlength=len(keys))
    now_s = np.array(
        [float(iteration_s(latency.curve, on_worker[w], kv_tokens[w])) for w, latency in enumerate(of_pool)]
    )
    generated = (at_s - since_s) / np.maximum(now_s[chosen], 1e-6)
    contexts = prompts + generated
    context = float(contexts.mean())
    kv_token_s = np.array([latency.curve.decode_kv_token_s for latency in of_pool])
    counts = stands_for * np.arange(n + 1, dtype=np.float64)
    table = np.stack(
        [
            _iteration_row(latency, counts, context, cards.get(key.worker_id))
            for key, latency in zip(keys, of_pool, strict=True)
        ]
    )
    extra_s = contexts[:, None] * kv_token_s[None, :]
    return DecodeGame(requests, table, extra_s, chosen, max(float(generated.mean()), 1.0), stands_for)


def _iteration_row(latency: WorkerLatency, counts: Floats, context: float, card: WorkerCard | None) -> Floats:
    """Return a worker's iteration time for each number of requests; 0 for none.

    Beyond what it holds at once, in slots or in KV blocks, its requests take turns: l(k) = l(s) * k / s. The
    total k * l(k) is kept convex, which it is but for the kink there when the cache is nearly full.
    """
    kv_capacity = slots = np.inf
    if card is not None and card.total_kv_blocks:
        kv_capacity = card.total_kv_blocks * card.kv_block_size
    if card is not None and card.max_num_seqs:
        slots = card.max_num_seqs
    held = np.minimum(counts, max(min(slots, kv_capacity / max(context, 1.0)), 1.0))
    others = np.maximum(held - 1, 0) * context
    row = np.asarray(iteration_s(latency.curve, held, others, np.minimum(held * context / kv_capacity, 1.0)))
    row = row * counts / np.maximum(held, 1.0)
    row[0] = 0.0
    total = np.concatenate(([0.0], np.maximum.accumulate(np.diff(row * np.arange(len(row))))))
    return np.concatenate(([0.0], np.cumsum(total)[1:] / np.arange(1, len(row))))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
