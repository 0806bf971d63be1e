"""Who should have gone where at one instant of a recording, and what it would have saved.

Owns: the instant that is explained, each request's own part of the cost as it was and at best, where the cost
      beyond an unloaded system was from.
Does not own: playing the recording (playback.py), the games (snapshot.py), their optimum (games/routing.py),
              the tables (explained.py).
Invariant: what the requests save adds up to what the moves save; nobody is moved for next to nothing.
Source: theory.md, Γ_R.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo_poa.advice import worth_it
from dynamo_poa.coupling import AllocationEstimate, CachingEstimate, Coupling, couple
from dynamo_poa.errors import ConfigError, RecordingError
from dynamo_poa.estimator import shares
from dynamo_poa.games.routing import decode_optimum, prefill_optimum
from dynamo_poa.output_tokens import OutputTokens
from dynamo_poa.serve.playback import Instant, Playback, usual_log
from dynamo_poa.serve.slow_games_played import SlowGamesPlayed
from dynamo_poa.snapshot import DecodeGame, PrefillGame, Snapshot, price
from dynamo_poa.values import Estimate, Role, Shares, WorkerKey

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

DECIMALS = 9  # of a second; what differs by less is alike
STAY_FRAC = 0.01  # of a request's cost: what a move must save to be shown


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A request on a worker: what of its prompt is not cached there, and how long it has still to wait."""

    worker_id: str
    dp_rank: int
    uncached_tokens: int | None
    latency_s: float


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """One request where it is and where the best assignment has it.

    saved_s:  its own latency here less that there; requests that stay gain or lose by the others' moves
    """

    request_id: str
    prompt_tokens: int
    here: Place
    there: Place
    moved: bool
    saved_s: float


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One game of one leg.

    phase:        prompts that wait or are computed (`prefill`), or requests that decode (`decode`)
    optimal_s:    at the very best
    after_s:      after the moves shown: the best but for moves that save less than STAY_FRAC of a request's
                  cost, of which there are many among equal workers
    stands_for:   how many requests each row stands for: above 1 only of very many
    rows:         those that move first, what saves most on top
    """

    role: Role
    phase: str
    observed_s: float
    optimal_s: float
    after_s: float
    stands_for: float
    rows: tuple[Assigned, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `explain` says.

    at_s:    of the snapshot, since the first message
    shares:  of the cost beyond an unloaded system
    coupling:  the three games of that instant, and where the cost is from
    caching, allocation:  the other two games
    lacking: legs that cannot be priced, and why
    notes:   what makes it less than exact, up to the next snapshot
    """

    asked_s: float
    at_s: float
    observed_s: float
    optimal_s: float
    saved_s: float
    shares: Shares | None
    games: tuple[Explained, ...]
    lacking: dict[str, str]
    notes: dict[str, int]
    coupling: Coupling = Coupling()
    caching: CachingEstimate = CachingEstimate(reason="not looked at")
    allocation: AllocationEstimate = AllocationEstimate(reason="not looked at")

    @property
    def poa_hat(self) -> float | None:
        """Return the observed cost over the best, None where nothing was priced."""
        return self.observed_s / self.optimal_s if self.optimal_s > 0 else None


def explain(path: Path, at_s: float, *, block_size: int) -> Explanation:
    """Explain the snapshot nearest at or before an instant.

    Raises:  RecordingError when the file is not a recording or holds no decisions, ConfigError when the
             instant is not within it.
    """
    output_tokens = OutputTokens()
    playback = Playback(
        path,
        block_size=block_size,
        make_log=usual_log(block_size),
        on_pass=output_tokens.observe,
    )
    games = SlowGamesPlayed(playback, output_tokens, at_s)
    nearest = Instant(0.0, [])
    for instant in playback.instants():
        if instant.at_s > at_s:
            break
        nearest = instant
        games.look(instant.at_s)
    else:
        if not at_s <= playback.at_s:
            bounds = f"in [0, {playback.at_s:.3f}], seconds since the first message of {path}"
            raise ConfigError([f"--at = {at_s:g}: must be {bounds}"])
    if not playback.log.batches and not nearest.snapshots:
        raise RecordingError(f"{path}: holds no decisions up to {at_s:g} s: nobody is known to be in flight")
    found = explain_snapshots(at_s, nearest.at_s, nearest.snapshots, playback.inexact)
    caching, allocation = games.caching, games.allocation()
    unpriced = {role: Estimate(reason=lack) for role, lack in found.lacking.items()}
    routing = Estimate(poa_hat=found.poa_hat, shares=found.shares, legs=unpriced)
    return msgspec.structs.replace(
        found,
        caching=caching,
        allocation=allocation,
        coupling=couple(routing, caching, allocation, worth_it(allocation)),
    )


def explain_snapshots(
    asked_s: float, at_s: float, snapshots: Sequence[Snapshot], notes: dict[str, int]
) -> Explanation:
    """Explain the snapshots of one instant, one of each leg."""
    prices = [price(snapshot) for snapshot in snapshots]
    observed_s, optimal_s = sum(one.observed_s for one in prices), sum(one.optimal_s for one in prices)
    return Explanation(
        asked_s=asked_s,
        at_s=at_s,
        observed_s=observed_s,
        optimal_s=optimal_s,
        saved_s=observed_s - optimal_s,
        shares=shares(prices),
        games=tuple(game for snapshot in snapshots for game in _games(snapshot)),
        lacking={str(snapshot.role): snapshot.lack for snapshot in snapshots if snapshot.lack},
        notes=notes,
    )


def _games(snapshot: Snapshot) -> Iterator[Explained]:
    if (waiting := snapshot.prefill) is not None:
        best = _prefill_best(waiting)
        here, there = _prefill_latencies(waiting, waiting.chosen), _prefill_latencies(waiting, best)
        yield _explained(snapshot._replace(decode=None), "prefill", waiting, best, here, there)
    if (decoding := snapshot.decode) is not None:
        best = _decode_best(decoding)
        here, there = _decode_latencies(decoding, decoding.chosen), _decode_latencies(decoding, best)
        yield _explained(snapshot._replace(prefill=None), "decode", decoding, best, here, there)


def _prefill_best(game: PrefillGame) -> Indices:
    """Return the best assignment in which going elsewhere is charged a little."""
    elsewhere = _elsewhere(game.chosen, len(game.backlog_s))
    charged_s = game.processing_s * (1 + STAY_FRAC * elsewhere)
    return _settled(game, prefill_optimum(charged_s, game.backlog_s).workers, game.processing_s)


def _decode_best(game: DecodeGame) -> Indices:
    """The same; the charge is a share of the lightest iteration there is."""
    elsewhere = _elsewhere(game.chosen, len(game.iteration_s))
    charge_s = STAY_FRAC * float((game.iteration_s[:, 1] + game.extra_s).min())
    best = decode_optimum(game.iteration_s, game.extra_s + charge_s * elsewhere).workers
    return _settled(game, best, game.extra_s)


def _settled(game: PrefillGame | DecodeGame, best: Indices, cost_s: Floats) -> Indices:
    """Return the assignment with requests that are alike in a fixed order: which of them goes is a toss-up.

    A batch's requests often are alike, and without this the last digits of a machine would toss the coin.
    """
    alike: dict[tuple[int, bytes], list[int]] = {}
    for row, chosen in enumerate(game.chosen.tolist()):
        alike.setdefault((chosen, np.round(cost_s[row], DECIMALS).tobytes()), []).append(row)
    settled = best.copy()
    for rows in alike.values():
        rows.sort(key=lambda row: game.requests[row].request_id)
        settled[rows] = np.sort(best[rows])
    return settled


def _elsewhere(chosen: Indices, workers: int) -> Floats:
    away: Floats = (chosen[:, None] != np.arange(workers)).astype(np.float64)
    return away


def _prefill_latencies(game: PrefillGame, workers: Indices) -> Floats:
    """Return how long until each prompt is done, each worker serving the shortest first, as it is priced."""
    own_s = game.processing_s[np.arange(len(workers)), workers]
    latency_s = np.empty(len(workers))
    for worker in np.unique(workers):
        there = np.flatnonzero(workers == worker)
        order = there[np.argsort(own_s[there], kind="stable")]
        latency_s[order] = game.backlog_s[worker] + np.cumsum(own_s[order])
    return latency_s


def _decode_latencies(game: DecodeGame, workers: Indices) -> Floats:
    """Return how long each request's iterations still to come take."""
    on = np.bincount(workers, minlength=len(game.iteration_s))
    shared_s = game.iteration_s[workers, on[workers]]
    latency_s: Floats = game.rounds * (shared_s + game.extra_s[np.arange(len(workers)), workers])
    return latency_s


def _explained(
    snapshot: Snapshot,
    phase: str,
    game: PrefillGame | DecodeGame,
    best: Indices,
    here_s: Floats,
    there_s: Floats,
) -> Explained:
    tokens = game.tokens if isinstance(game, PrefillGame) else None

    def place(row: int, worker: int, latency_s: float) -> Place:
        key: WorkerKey = snapshot.workers[worker]
        return Place(
            worker_id=str(key.worker_id),
            dp_rank=key.dp_rank,
            uncached_tokens=None if tokens is None else round(tokens[row, worker]),
            latency_s=latency_s,
        )

    rows = [
        Assigned(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            here=place(row, chosen, here),
            there=place(row, better, there),
            moved=better != chosen,
            saved_s=here - there,
        )
        for row, (request, chosen, better, here, there) in enumerate(
            zip(
                game.requests,
                game.chosen.tolist(),
                best.tolist(),
                here_s.tolist(),
                there_s.tolist(),
                strict=True,
            )
        )
    ]
    priced = price(snapshot)
    return Explained(
        role=snapshot.role,
        phase=phase,
        observed_s=priced.observed_s,
        optimal_s=priced.optimal_s,
        after_s=game.stands_for * math.fsum(there_s),
        stands_for=game.stands_for,
        rows=tuple(
            sorted(rows, key=lambda row: (not row.moved, -round(row.saved_s, DECIMALS), row.request_id))
        ),
    )
