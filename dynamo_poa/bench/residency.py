"""How much memory the mirrors of a fleet's caches take, and how many block events a second one core applies.

Owns: made-up caches that fill and then evict, their messages, timing them, the figure.
Does not own: the mirrors (residency.py, block_store.py), the wiring from the bus on (ingest.py measures it).
Invariant: messages are made outside the time that counts, and nothing of them is refused; at the end every
           mirror holds what its cache does.
Source: shapes as recorded from Dynamo 1.4.2; ten million blocks of 16 tokens are the KV cache of 64 ranks
        with 2.5 million tokens each.
"""

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from dynamo_poa.bench.processes import resident_bytes
from dynamo_poa.bench.report import Figure, MeasurementError, at_least, at_most, plain
from dynamo_poa.fleet import Fleet
from dynamo_poa.prefixes import ODD
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import KV_EVENTS

RANKS = 64
PROMPT_BLOCKS = 16  # stored by one event; every second prompt goes on where the one before ended
CHURN_FRAC = 0.5  # of each cache is evicted and replaced: more than evictions are remembered of
SLICE_BLOCKS = 512  # of a rank are made, then applied: ranks take turns
SINGLES = 400  # prompts of a rank that come block by block, as decode blocks do
LOOKS = 20
TIMEOUT_S = 900.0
SUBJECT = f"namespace.bench.component.backend.endpoint.generate.{KV_EVENTS}"
GOAL_BYTES = 200.0  # a block
GOAL_MB = 2000.0
GOAL_PER_S = 100_000.0
GOAL_LOOK_MS = 5.0
MB = 1e6
_MASK = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What one run found; rates are block events, stored or removed, per second of CPU."""

    blocks: int
    before_bytes: int
    after_bytes: int
    fill_per_s: float
    churn_per_s: float
    slowest_per_s: float
    single_per_s: float
    longest_ms: float  # one message: a merge is in it
    look_ms: float
    arrays_ms: float


class Cache:
    """A rank's cache: first in, first out. What a block is called follows from its number."""

    def __init__(self, worker: int, capacity_blocks: int) -> None:
        self.worker = worker
        self.capacity_blocks = capacity_blocks
        self.first = self.end = 0  # blocks first to end - 1 are held
        self._messages = self._events = 0

    def name(self, number: int) -> int:
        """Return the hash of a block."""
        return ((self.worker << 40) + number + 1) * ODD & _MASK

    def prompt(self, blocks: int) -> bytes:
        """Store a prompt, after the oldest have made room; return the message that says so."""
        events = []
        if (most := self.end + blocks - self.capacity_blocks) > self.first:
            gone = [self.name(number) for number in range(self.first, most)]
            events.append(self._event({"removed": {"block_hashes": gone}}))
            self.first = most
        parent = self.name(self.end - 1) if self.end // PROMPT_BLOCKS % 2 else None
        names = [self.name(number) for number in range(self.end, self.end + blocks)]
        stored = [{"block_hash": name, "tokens_hash": name ^ ODD, "mm_extra_info": None} for name in names]
        events.append(
            self._event({"stored": {"parent_hash": parent, "start_position": None, "blocks": stored}})
        )
        self.end += blocks
        envelope = {
            "publisher_id": self.worker,
            "sequence": self._messages,
            "published_at": 0,
            "topic": KV_EVENTS,
            "payload": _encode(events),
        }
        self._messages += 1
        return _encode(envelope)

    def _event(self, data: dict[str, Any]) -> dict[str, Any]:
        self._events += 1
        event = {"event_id": self._events, "dp_rank": 0, "data": data}
        return {"worker_id": self.worker, "storage_tier": "device", "event": event}


class Run:
    """A fleet and its caches."""

    def __init__(self, blocks: int, ranks: int) -> None:
        each = blocks // ranks // PROMPT_BLOCKS * PROMPT_BLOCKS
        self.fleet = Fleet("bench", stale_s=30.0)
        self.caches = [Cache(worker, each) for worker in range(1, ranks + 1)]
        self.longest_s = 0.0
        self._at_s = 0.0
        self.fleet.set_cards(
            [
                WorkerCard(
                    worker_id=cache.worker,
                    role=Role.AGGREGATED,
                    kv_block_size=16,
                    total_kv_blocks=each,
                )
                for cache in self.caches
            ],
            0.0,
        )

    def turns(self, blocks: int, prompt_blocks: int = PROMPT_BLOCKS) -> Iterator[tuple[int, float]]:
        """Store so many blocks at each rank; yield each turn's block events and how long they took."""
        for start in range(0, blocks, SLICE_BLOCKS):
            prompts = min(SLICE_BLOCKS, blocks - start) // prompt_blocks
            for cache in self.caches:
                before = cache.first + cache.end
                messages = [cache.prompt(prompt_blocks) for _ in range(prompts)]
                events = cache.first + cache.end - before
                yield events, self._apply(messages)
                self._at_s += events / GOAL_PER_S

    def _apply(self, messages: list[bytes]) -> float:
        observe, spent_s = self.fleet.observe, 0.0
        for message in messages:
            before_s = time.thread_time()
            observe(SUBJECT, message, self._at_s, 0.0)
            took_s = time.thread_time() - before_s
            spent_s += took_s
            self.longest_s = max(self.longest_s, took_s)
        return spent_s


def run(blocks: int, ranks: int = RANKS) -> Found:
    """Fill the caches, replace a part of them, look at them; in a process of its own.

    Raises:  MeasurementError when a mirror does not hold what its cache does.
    """
    before_bytes = resident_bytes(os.getpid())
    world = Run(blocks, ranks)
    each = world.caches[0].capacity_blocks
    fill = list(world.turns(each))
    churn = list(world.turns(int(each * CHURN_FRAC) // SLICE_BLOCKS * SLICE_BLOCKS))
    single = list(world.turns(SINGLES, prompt_blocks=1))
    looks_ms: list[float] = []
    seen = world.fleet.caches()
    for _ in range(LOOKS):
        list(world.turns(PROMPT_BLOCKS))
        seen = []  # what was seen before is let go by the thread that looked at it
        before_s = time.thread_time()
        seen = world.fleet.caches()
        looks_ms.append((time.thread_time() - before_s) * 1e3)
    gc.collect()
    after_bytes = resident_bytes(os.getpid())
    before_s = time.thread_time()
    known = sum(len(snapshot.chains) for _, snapshot in seen)
    arrays_ms = (time.thread_time() - before_s) * 1e3
    held = [snapshot.resident_blocks for _, snapshot in seen]
    if held != [each] * ranks or known != each * ranks or world.fleet.dropped:
        raise MeasurementError(f"mirrors hold {known} blocks: must be {each * ranks}")
    return Found(
        blocks=known,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        fill_per_s=_rate(fill),
        churn_per_s=_rate(churn),
        slowest_per_s=min(_rate(churn[at : at + ranks]) for at in range(0, len(churn), ranks)),
        single_per_s=_rate(single),
        longest_ms=world.longest_s * 1e3,
        look_ms=statistics.median(looks_ms),
        arrays_ms=arrays_ms,
    )


def measure(blocks: int, say: Callable[[str], None]) -> Figure:
    """Measure with so many blocks, over all ranks.

    Raises:  MeasurementError when the process ended or a mirror does not hold what its cache does.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, blocks), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(TIMEOUT_S) else f"nothing came in {TIMEOUT_S:g} s"
    except EOFError:
        answer = "the process of the measurement ended; see its output above"
    finally:
        process.terminate()
        process.join()
    if isinstance(answer, str):
        raise MeasurementError(answer)
    assert isinstance(answer, Found)
    say(f"{answer.blocks:,} blocks: {answer.churn_per_s:,.0f} block events/s of CPU")
    return figure(answer)


def figure(found: Found) -> Figure:
    """Turn a run into the figure."""
    grown_bytes = found.after_bytes - found.before_bytes
    return Figure(
        name="residency",
        title="mirrors of the workers' KV caches, decoding included",
        measures=(
            at_most("rss_mb", "process holding them", found.after_bytes / MB, "MB", GOAL_MB),
            at_most("bytes_per_block", "memory per block", grown_bytes / found.blocks, "B", GOAL_BYTES),
            at_least("per_s", "block events per second of CPU", found.churn_per_s, "/s", GOAL_PER_S),
            plain("slowest_per_s", "slowest round of the ranks", found.slowest_per_s, "/s"),
            plain("fill_per_s", "while they fill", found.fill_per_s, "/s"),
            plain("single_per_s", "one block a message", found.single_per_s, "/s"),
            plain("longest_ms", "longest message, with its merge", found.longest_ms, "ms"),
            at_most("look_ms", "snapshot of all", found.look_ms, "ms", GOAL_LOOK_MS),
            plain("arrays_ms", "its arrays, made in the thread that reads them", found.arrays_ms, "ms"),
        ),
        conditions=(
            f"{found.blocks:,} blocks over {RANKS} ranks, caches full: events store and remove "
            f"{PROMPT_BLOCKS} blocks; evictions of the last 30 s remembered",
        ),
    )


def _rate(turns: list[tuple[int, float]]) -> float:
    return sum(events for events, _ in turns) / sum(spent_s for _, spent_s in turns)


def _serve(answers: Connection, blocks: int) -> None:
    try:
        answers.send(run(blocks))
    except MeasurementError as error:
        answers.send(str(error))
