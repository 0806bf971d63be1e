"""What a decision by marginal cost takes of the router's CPU, beyond one left to Dynamo; and a prefix.

Owns: the fleets decided for, timing whole trips under either selection and prompts' hashing, the figure.
Does not own: picking, booking and counting, which run as they do in the router's process.
Invariant: either selection decides for the same requests on the same workers, in turns. Dynamo's router is a
           stub under both: of its own time there is one question in either case, of like length.
Source: goals: 150 us at 16 workers and 400 us at 128. Measured on 1.4.2, 6 workers, 1024 tokens, medians:
        best_worker with an override 79 us, get_overlap_scores 82 us.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dynamo_poa.avoid import AvoidList
from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_most, plain
from dynamo_poa.bench.story import quantile
from dynamo_poa.booking import PinnedBookings
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.ledger import Ledger
from dynamo_poa.marginal import Loads
from dynamo_poa.picker import Picker
from dynamo_poa.trip import LegMeans, RouterStats, Sampler, Trip
from dynamo_poa.values import Curve, Outcome, Role, RouterParams, Selection, WorkerCard, WorkerKey
from dynamo_poa.wire import Coefficients, DecisionEvent, PoolSpeed, WorkerSpeed

GOALS_US = {16: 150.0, 128: 400.0}  # by workers
PROMPT_TOKENS, BLOCK_SIZE = 1024, 16
IN_FLIGHT = 8  # requests a worker
HASHED_TOKENS = 4096  # of the prompts whose prefixes are told
BATCH = 50  # decisions timed together: a clock costs too
CURVE = Curve(prefill_base_s=0.005, prefill_token_s=1e-4, decode_base_s=0.006, decode_request_s=2.5e-4)


class Kind(NamedTuple):
    """One leg at one size."""

    role: Role
    workers: int


KINDS = tuple(Kind(role, workers) for workers in GOALS_US for role in Role)


def measure(rounds: int, say: Callable[[str], None]) -> Figure:
    """Time so many batches of decisions of each kind and selection.

    Raises:  MeasurementError when decisions did not go the way that was to be timed.
    """
    spent: dict[Kind, dict[Selection, list[float]]] = {}
    for kind in KINDS:
        spent[kind] = asyncio.run(_decide(kind, rounds))
        added_us = _added_us(spent[kind])
        say(f"{kind.role}, {kind.workers} workers: {statistics.median(added_us):.0f} us more than Dynamo's")
    hashed = _hash(rounds)
    say(f"a prefix of {HASHED_TOKENS} tokens: {statistics.median(hashed) * 1e6:.0f} us")
    return figure(spent, hashed)


def figure(spent: dict[Kind, dict[Selection, list[float]]], hashed: list[float]) -> Figure:
    """Turn CPU seconds of a decision, and of a prompt's hashing, mean of each batch, into the figure."""
    measures: list[Measure] = []
    for kind, times in spent.items():
        what, key = f"{kind.role}, {kind.workers} workers", f"{kind.role}_{kind.workers}"
        added_us, goal_us = _added_us(times), GOALS_US[kind.workers]
        measures += [
            at_most(f"{key}_added_us", f"{what}: added", statistics.median(added_us), "us", goal_us),
            plain(f"{key}_added_p90_us", f"{what}: added, P90 of batches", quantile(added_us, 0.9), "us"),
        ]
    prefix_us = statistics.median(hashed) * 1e6
    measures.append(
        plain("prefix_us", f"prefixes of a sampled prompt, {HASHED_TOKENS} tokens", prefix_us, "us")
    )
    return Figure(
        name="decide",
        title="CPU that a decision by marginal cost adds to one by Dynamo's selection",
        measures=tuple(measures),
        conditions=(
            f"prompts of {PROMPT_TOKENS} tokens, {IN_FLIGHT} requests in flight a worker; a decision is all "
            "of a request's choosing, booking, first token and end, the events for Dynamo's router included",
            "Dynamo's router is a stub that answers at once: its one question takes 79 us under its own "
            "selection and 82 us under marginal cost (6 workers), and none on the decode leg",
            f"batches of {BATCH}, of either selection in turns",
            "prefixes are hashed only of `candidates_per_s` prompts a second and leg, 50 by default, and in "
            "none of the decisions timed here",
        ),
    )


def _added_us(times: dict[Selection, list[float]]) -> list[float]:
    pairs = zip(times[Selection.MARGINAL], times[Selection.KV], strict=True)
    return [(marginal_s - kv_s) * 1e6 for marginal_s, kv_s in pairs]


class _Router:
    """KvRouter's answers without its work."""

    def __init__(self, workers: list[int], rng: random.Random) -> None:
        self._workers, self._rng = workers, rng

    async def best_worker(self, *_: Any) -> tuple[int, int, int]:
        return self._rng.choice(self._workers), 0, 16

    async def get_overlap_scores(self, _: list[int]) -> dict[str, Any]:
        scores = [{"worker_id": w, "dp_rank": 0, "router_credit_blocks": 16.0} for w in self._workers[::2]]
        return {"workers": scores}

    async def mark_prefill_complete(self, _: str) -> None: ...

    async def free(self, _: str) -> None: ...


class _Fleet:
    """What a leg's trips share, all of it the router's own but Dynamo, discovery and the bus."""

    def __init__(self, kind: Kind, clock: Clock) -> None:
        # Dynamo takes a second to import, which `--help` need not wait for.
        from dynamo_poa.dynamo_host import WorkerPool, router_override, sequence_hashes

        rng, role = random.Random(1), kind.role
        ids = [rng.getrandbits(64) for _ in range(kind.workers)]
        self._cards = {
            worker: WorkerCard(
                worker_id=worker, role=role, kv_block_size=BLOCK_SIZE, total_kv_blocks=4096, max_num_seqs=256
            )
            for worker in ids
        }
        self._ranks = [(WorkerKey(worker, 0), card) for worker, card in self._cards.items()]
        self.current = self.params(Selection.KV)
        self.stats, avoid = RouterStats(), AvoidList(15.0, clock)
        self.coefficients, self.ledger = CoefficientsHolder(clock.monotonic_s), Ledger(role, clock)
        self.pinned = PinnedBookings(
            self, "workers.backend.generate", lambda tokens: sequence_hashes(tokens, BLOCK_SIZE), clock, rng
        )
        self.means = LegMeans(
            role=role,
            pool=WorkerPool(_Router(ids, rng), None, role, BLOCK_SIZE, clock, self.pinned),
            override=lambda params, preset: router_override(role, "overlap_score_credit", params, preset),
            params=self,
            events=self,
            directory=self,
            handovers=None,
            avoid=avoid,
            stats=self.stats,
            sampler=Sampler(0.0, clock),
            clock=clock,
            picker=Picker(self.ledger, self.coefficients, self, avoid, clock, rng),
        )

    @staticmethod
    def params(selection: Selection) -> RouterParams:
        return RouterParams(revision=1, router_temperature=0.0, overlap_weight=1.0, selection=selection)

    def say(self, revision: int) -> None:
        """Have coefficients in force."""
        speeds = tuple(WorkerSpeed(*key, CURVE, 100.0) for key, _ in self._ranks)
        self.coefficients.offer(
            Coefficients(
                controller_id="bench",
                revision=revision,
                sent_at_s=0.0,
                lease_s=3600.0,
                pools={self.means.role: PoolSpeed(curve=CURVE)},
                workers=speeds,
            )
        )

    # trip.Directory, trip.Events and booking.Publisher

    def card(self, worker_id: int) -> WorkerCard | None:
        return self._cards.get(worker_id)

    def ranks(self, role: Role) -> list[tuple[WorkerKey, WorkerCard]]:
        return self._ranks

    def refresh(self) -> None: ...

    def refused(self, worker_id: int) -> bool:
        return False

    def add(self, event: DecisionEvent) -> None: ...

    async def publish(self, subject: str, data: bytes) -> None: ...


async def _decide(kind: Kind, rounds: int) -> dict[Selection, list[float]]:
    """Return CPU seconds of a decision, mean of each batch."""
    clock, rng = SystemClock(), random.Random(2)
    fleet = _Fleet(kind, clock)
    fleet.say(1)
    spent: dict[Selection, list[float]] = {selection: [] for selection in Selection}
    async with fleet.pinned:
        running = [await _begun(fleet, rng) for _ in range(kind.workers * IN_FLIGHT)]
        for number in range(-1, rounds):
            for selection in Selection:
                fleet.current = fleet.params(selection)
                for trip in running:
                    trip.moved()  # a token, as running requests get with each pass: nobody seems to stall
                before_s = time.thread_time()
                for _ in range(BATCH):
                    running.append(await _begun(fleet, rng))
                    running.pop(0).end(Outcome.OK, None)
                await clock.sleep(0.02)  # the events go out
                if number >= 0:
                    spent[selection].append((time.thread_time() - before_s) / BATCH)
        for trip in running:
            trip.end(Outcome.OK, None)
    if set(fleet.stats.marginal) != {"picked"} or fleet.ledger.in_flight() != Loads():
        raise MeasurementError(f"decisions went astray: {dict(fleet.stats.marginal)}")
    return spent


def _hash(rounds: int) -> list[float]:
    """Return CPU seconds of telling a prompt's prefixes, mean of each batch."""
    from dynamo_poa.dynamo_host import WorkerPool

    rng = random.Random(3)
    pool = WorkerPool(None, None, Role.PREFILL, BLOCK_SIZE, SystemClock())
    spent = []
    for _ in range(rounds):
        batch = [[rng.randrange(32_000) for _ in range(HASHED_TOKENS)] for _ in range(BATCH)]
        before_s = time.thread_time()
        depths = {len(pool.prefix(tokens)) for tokens in batch}
        spent.append((time.thread_time() - before_s) / BATCH)
        if depths != {(HASHED_TOKENS // BLOCK_SIZE).bit_length()}:
            raise MeasurementError(f"prompts were hashed to depths {depths}")
    return spent


async def _begun(fleet: _Fleet, rng: random.Random) -> Trip:
    prefix = rng.randrange(32)  # prompts share beginnings, as real ones do
    tokens = [prefix] * (PROMPT_TOKENS // 2) + [rng.randrange(32_000)] * (PROMPT_TOKENS // 2)
    trip = Trip(fleet.means, {"token_ids": tokens, "stop_conditions": {"max_tokens": 128}}, "request")
    await trip.choose(1)
    trip.first_token()
    return trip
