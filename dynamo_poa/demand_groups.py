"""Which prefixes are asked for how often, and which workers served them: the demand of the caching game.

Owns: the window of sampled prompts, what counts as one group of them, its rate.
Does not own: the names of prefixes (prefixes.py), which prompts are sampled (trip.py), who holds what
              (residency.py), what serving a group costs (placement.py).
Invariant: bounded whatever routers send; every sampled request is in exactly one group or shares nothing, so
           that rates add up to the arrivals.
Source: theory.md, Γ_KV: request rates λ_g per prefix group g.
"""

from collections import defaultdict, deque
from typing import NamedTuple

import msgspec

from dynamo_poa.prefixes import UNKNOWN, depth_blocks
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import Chosen

MAX_SAMPLED = 10_000  # prompts remembered, 7 MB; of more the oldest are let go
BUCKETS = 60  # arrivals are counted in so many pieces of the window


class PrefixGroup(msgspec.Struct, frozen=True):
    """Requests that begin alike.

    chain:   rolling hash of the prefix they share
    blocks:  its length, a power of two; a cache may hold more of what they share, never double
    rates:   requests a second by the worker that they were sent to, unsampled ones included
    """

    chain: int
    blocks: int
    rates: dict[WorkerKey, float]

    @property
    def rate(self) -> float:
        """Return the requests a second to all workers."""
        return sum(self.rates.values())


class _Sampled(NamedTuple):
    at_s: float
    prefix: tuple[int, ...]
    worker: WorkerKey


class PrefixDemand:
    """The sampled prompts of the last `window_s`, of the legs that compute prompts.

    A request counts once, by its first attempt, and only where it has a full block: a shorter one has no
    prefix to be cached.
    """

    def __init__(self, window_s: float, block_size: int) -> None:
        self._window_s, self._block_size = window_s, block_size
        self._sampled: deque[_Sampled] = deque()
        self._sharing: dict[int, int] = {}  # by chain, at every depth: sampled requests that begin with it
        self._arrivals: deque[tuple[float, int]] = deque()  # by piece of the window: when it began, how many
        self._since_s: float | None = None

    def add(self, event: Chosen, at_s: float) -> None:
        """Take in a decision received at an instant, not before the ones taken in already."""
        blocks = event.prompt_tokens // self._block_size
        if event.role is Role.DECODE or event.attempt != 1 or not blocks:
            return
        if self._since_s is None:
            self._since_s = at_s
        if self._arrivals and at_s - self._arrivals[-1][0] < self._window_s / BUCKETS:
            began_s, count = self._arrivals.pop()
            self._arrivals.append((began_s, count + 1))
        else:
            self._arrivals.append((at_s, 1))
        # A router of another block size, or one that tells no depth or too many, says nothing of this cache.
        if len(event.prefix) != blocks.bit_length() or UNKNOWN in event.prefix:
            return
        self._sampled.append(_Sampled(at_s, event.prefix, WorkerKey(event.worker_id, event.dp_rank)))
        for chain in event.prefix:
            self._sharing[chain] = self._sharing.get(chain, 0) + 1
        if len(self._sampled) > MAX_SAMPLED:
            self._let_go()

    def advance(self, at_s: float) -> None:
        """Let go of what is older than the window."""
        while self._sampled and at_s - self._sampled[0].at_s > self._window_s:
            self._let_go()
        while self._arrivals and at_s - self._arrivals[0][0] > self._window_s:
            self._arrivals.popleft()

    def groups(self, at_s: float, most: int) -> tuple[PrefixGroup, ...]:
        """Return the groups asked for most, most first.

        A request belongs to the longest prefix that another sampled request of the window has, too.

            rate of a group at a worker = its sampled requests there * arrivals / sampled / span

        Returns:  requests per second; () before two sampled requests have begun alike.
        """
        counts: defaultdict[int, defaultdict[WorkerKey, int]] = defaultdict(lambda: defaultdict(int))
        blocks: dict[int, int] = {}
        sharing = self._sharing
        for sampled in self._sampled:
            for index, chain in enumerate(reversed(sampled.prefix), 1):
                if sharing[chain] > 1:
                    blocks[chain] = depth_blocks(len(sampled.prefix) - index)
                    counts[chain][sampled.worker] += 1
                    break
        asked = {chain: sum(by_worker.values()) for chain, by_worker in counts.items()}
        each = self._each(at_s)
        return tuple(
            PrefixGroup(chain, blocks[chain], {key: count * each for key, count in counts[chain].items()})
            for chain in sorted(asked, key=lambda chain: (-asked[chain], chain))[:most]
        )

    def unshared_rate(self, at_s: float) -> float:
        """Return how many requests a second begin like no other: no cache placement serves them."""
        alone = sum(self._sharing[sampled.prefix[0]] == 1 for sampled in self._sampled)
        return alone * self._each(at_s)

    def arrival_rate(self, at_s: float) -> float:
        """Return how many requests a second have a prefix at all, sampled or not."""
        span_s = self._span_s(at_s)
        return self._arrived / span_s if span_s > 0 else 0.0

    @property
    def _arrived(self) -> int:
        return sum(count for _, count in self._arrivals)

    def _each(self, at_s: float) -> float:
        """Return how many requests a second one sampled request stands for."""
        return self.arrival_rate(at_s) / len(self._sampled) if self._sampled else 0.0

    def _span_s(self, at_s: float) -> float:
        return 0.0 if self._since_s is None else min(at_s - self._since_s, self._window_s)

    def _let_go(self) -> None:
        for chain in self._sampled.popleft().prefix:
            self._sharing[chain] -= 1
            if not self._sharing[chain]:
                del self._sharing[chain]
