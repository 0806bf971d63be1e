"""Made-up traffic of a fleet of any size: what workers, and a router before them, would say.

Owns: messages of Dynamo's three topics and decision batches, numbered as theirs are; a KV cache per worker
      that fills and then evicts.
Does not own: how often they are sent (tick.py, memory.py).
Invariant: nothing of it is refused, repeated or out of place for a fleet with these workers.
Source: shapes and sizes as recorded from Dynamo 1.4.2.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_poa.bench.replay import Message
from dynamo_poa.config import CommonConfig
from dynamo_poa.values import Candidate, Outcome, Role
from dynamo_poa.wire import (
    FORWARD_PASS_METRICS,
    KV_EVENTS,
    KV_METRICS,
    Chosen,
    DecisionBatch,
    DecisionEvent,
    Ended,
    FirstToken,
    subject,
)

_encode = msgspec.msgpack.Encoder().encode
_TOPIC_IDS = {KV_EVENTS: 1, KV_METRICS: 2, FORWARD_PASS_METRICS: 3}
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 16
STORED_BLOCKS = 4  # by one event


class Traffic:
    """What a fleet and its router say; each call makes one message.

    Args:  pools: the workers' ids by role.  blocks: capacity of each worker's cache.
           random_frac: share of choices that are any worker; the rest are the cheapest by Dynamo's cost.
           open_requests: so many are in flight at once.
    """

    def __init__(
        self,
        pools: Mapping[Role, Sequence[int]],
        common: CommonConfig,
        *,
        blocks: int,
        rng: random.Random,
        random_frac: float = 0.25,
        open_requests: int = 512,
    ) -> None:
        self._open_requests = open_requests
        self._open: deque[str] = deque()
        self._random_frac = random_frac
        self._pools, self._common, self._blocks, self._rng = pools, common, blocks, rng
        self._roles = {worker: role for role, workers in pools.items() for worker in workers}
        self.workers = list(self._roles)
        self._publishers = {worker: 8 * number for number, worker in enumerate(self.workers)}
        self._numbers: dict[tuple[str, int], int] = {}
        self._caches: dict[int, deque[int]] = {worker: deque() for worker in self.workers}
        self._events: dict[int, int] = dict.fromkeys(self.workers, 0)
        self._active = {worker: rng.randrange(20) for worker in self.workers}
        self._batches = self._requests = 0

    def any_message(self, wall_s: float) -> Message:
        """Return one of any topic, as frequent as recorded: six, two and two in ten."""
        worker = self._rng.choice(self.workers)
        draw = self._rng.random()
        if draw < 0.6:
            return self.forward_pass(worker, wall_s)
        return self.kv_metrics(worker, wall_s) if draw < 0.8 else self.kv_event(worker, wall_s)

    def forward_pass(self, worker: int, wall_s: float) -> Message:
        """Return the metrics of a pass with a few requests in it."""
        number = self._numbers.get((FORWARD_PASS_METRICS, worker), 0)
        running = self._rng.randrange(1, 32)
        payload = {
            "version": 1,
            "worker_id": str(worker),
            "dp_rank": 0,
            "counter_id": number + 1,
            "wall_time": 0.01,
            "scheduled_requests": {
                "num_prefill_requests": 1,
                "sum_prefill_tokens": 512,
                "var_prefill_length": 0.0,
                "sum_prefill_kv_tokens": 256,
                "num_decode_requests": running,
                "sum_decode_kv_tokens": running * PROMPT_TOKENS,
                "var_decode_kv_tokens": 12.5,
            },
            "queued_requests": {
                "num_prefill_requests": 2,
                "sum_prefill_tokens": 2 * PROMPT_TOKENS,
                "var_prefill_length": 0.0,
                "num_decode_requests": 0,
                "sum_decode_kv_tokens": 0,
                "var_decode_kv_tokens": 0.0,
            },
        }
        return self._message(FORWARD_PASS_METRICS, worker, payload, wall_s)

    def kv_metrics(self, worker: int, wall_s: float) -> Message:
        """Return a worker's own figure."""
        payload = {
            "worker_id": worker,
            "dp_rank": 0,
            "active_decode_blocks": None,
            "active_prefill_tokens": None,
            "kv_used_blocks": self._rng.randrange(self._blocks),
        }
        return self._message(KV_METRICS, worker, payload, wall_s)

    def kv_event(self, worker: int, wall_s: float) -> Message:
        """Return a prompt's blocks entering the cache, after the oldest have made room."""
        cache, events = self._caches[worker], list[Any]()
        if len(cache) + STORED_BLOCKS > self._blocks:
            gone = [cache.popleft() for _ in range(STORED_BLOCKS)]
            events.append(self._event(worker, {"removed": {"block_hashes": gone}}))
        new = [self._rng.getrandbits(64) for _ in range(STORED_BLOCKS)]
        cache.extend(new)
        blocks = [{"block_hash": one, "tokens_hash": one, "mm_extra_info": None} for one in new]
        stored = {"parent_hash": None, "start_position": None, "blocks": blocks}
        events.append(self._event(worker, {"stored": stored}))
        return self._message(KV_EVENTS, worker, events, wall_s)

    def decision_batch(self, requests: int, wall_s: float) -> Message:
        """Return so many new requests; all of a leg's pool were candidates.

        As many of the oldest end as there are more than `open_requests`; the middle one of those open gets
        its first token, so that of what is open about half waits for its prompt and half decodes.
        """
        events: list[DecisionEvent] = []
        for _ in range(requests):
            self._requests += 1
            name = f"request-{self._requests}"
            for role, pool in self._pools.items():
                candidates = tuple([self._candidate(worker) for worker in pool])
                chosen = self._choose(candidates)
                at_s = wall_s - self._rng.uniform(0.02, 0.2)
                events.append(Chosen(name, role, at_s, at_s, chosen, 0, PROMPT_TOKENS, 1, 1, candidates))
                self._move_load(chosen, self._rng.choice(pool))
            self._open.append(name)
            if len(self._open) > self._open_requests:
                answered = self._open[len(self._open) // 2]
                events += [FirstToken(answered, role, wall_s) for role in self._pools]
                oldest = self._open.popleft()
                events += [Ended(oldest, role, wall_s, Outcome.OK) for role in self._pools]
        self._batches += 1
        batch = DecisionBatch(
            router_id="router-made-up", sequence=self._batches, sent_at_s=wall_s, events=tuple(events)
        )
        return Message(subject(self._common.namespace, "decisions"), _encode(batch))

    def _candidate(self, worker: int) -> Candidate:
        """Return a worker as a router saw it: loads that change slowly, one prompt in ten partly cached."""
        cached_blocks = self._rng.randrange(48) if self._rng.random() < 0.1 else 0
        active = self._active[worker]
        return Candidate(
            worker,
            0,
            PROMPT_TOKENS - cached_blocks * BLOCK_TOKENS,
            active // 8 * PROMPT_TOKENS,
            active * PROMPT_TOKENS // BLOCK_TOKENS,
            active,
        )

    def _choose(self, candidates: tuple[Candidate, ...]) -> int:
        if self._rng.random() < self._random_frac:
            return self._rng.choice(candidates).worker_id
        return min(candidates, key=_cost).worker_id

    def _move_load(self, begun: int, ended: int) -> None:
        if self._active[ended]:
            self._active[ended] -= 1
            self._active[begun] += 1

    def _event(self, worker: int, change: dict[str, Any]) -> dict[str, Any]:
        self._events[worker] += 1
        event = {"event_id": self._events[worker], "dp_rank": 0, "data": change}
        return {"worker_id": worker, "storage_tier": "device", "event": event}

    def _message(self, topic: str, worker: int, payload: Any, wall_s: float) -> Message:
        number = self._numbers.get((topic, worker), 0)
        self._numbers[topic, worker] = number + 1
        component = "prefill" if self._roles[worker] is Role.PREFILL else "backend"
        envelope = {
            "publisher_id": self._publishers[worker] + _TOPIC_IDS[topic],
            "sequence": number,
            "published_at": int(wall_s * 1000),
            "topic": topic,
            "payload": _encode(payload),
        }
        where = f"namespace.{self._common.worker_namespace}.component.{component}.endpoint.generate.{topic}"
        return Message(where, _encode(envelope))


def _cost(candidate: Candidate) -> float:
    prefill_tokens = candidate.uncached_tokens + candidate.queued_prefill_tokens
    return prefill_tokens / BLOCK_TOKENS + candidate.decode_blocks
