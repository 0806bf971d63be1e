"""Which prefixes are asked for how often, and which workers served them: the demand of the caching game.

Owns: the window of sampled prompts, what counts as one group of them, its rate.
Does not own: the names of prefixes (prefixes.py), which prompts are sampled (trip.py), who holds what
              (residency.py), what serving a group costs (placement.py).
Invariant: bounded whatever routers send; every sampled request is in exactly one group or shares nothing, so
           that rates add up to the arrivals.
Source: theory.md, Γ_KV: request rates λ_g per prefix group g.
"""

from collections import Counter, defaultdict, deque
from itertools import pairwise
from typing import NamedTuple

import msgspec

from dynamo_poa.prefixes import UNKNOWN, depth_blocks, told_blocks
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import Chosen

MAX_SAMPLED = 10_000  # prompts remembered, 7 MB; of more the oldest are let go
BUCKETS = 60  # arrivals are counted in so many pieces of the window


class PrefixGroup(msgspec.Struct, frozen=True):
    """Requests that begin alike.

    chain:   rolling hash of the prefix they share
    blocks:  its length, a power of two; a cache may hold more of what they share, never double
    rates:   requests a second by the worker that they were sent to, unsampled ones included; without those of
             groups that begin with this one
    parent:  chain of the longest other group told of that this one begins with; UNKNOWN: none
    """

    chain: int
    blocks: int
    rates: dict[WorkerKey, float]
    parent: int = UNKNOWN

    @property
    def rate(self) -> float:
        """Return the requests a second to all workers."""
        return sum(self.rates.values())


class _Sampled(NamedTuple):
    at_s: float
    prefix: tuple[int, ...]
    worker: WorkerKey
    router_id: str


class PrefixDemand:
    """The sampled prompts of the last `window_s`, of the legs that compute prompts.

    A request counts once, by its first attempt, and only where it has a full block: a shorter one has no
    prefix to be cached.

    A router samples at most so many a second, so in a burst few of many. Within a router's window each
    sampled request stands for equally many all the same: rates add up to the arrivals, but prefixes asked
    for in bursts have too small a part in them, and those of quiet seconds too large a one.
    """

    def __init__(self, window_s: float, block_size: int) -> None:
        self._window_s, self._block_size = window_s, block_size
        self._sampled: deque[_Sampled] = deque()
        self._sharing: dict[int, int] = {}  # by chain, at every depth: sampled requests that begin with it
        # By piece of the window: when it began, how many came through each router.
        self._arrivals: deque[tuple[float, Counter[str]]] = deque()
        self._arrived: Counter[str] = Counter()  # in all pieces
        self._told: Counter[str] = Counter()  # of the sampled ones
        self._since_s: float | None = None

    def add(self, event: Chosen, at_s: float, router_id: str = "") -> None:
        """Take in a router's decision received at an instant, not before the ones taken in already."""
        blocks = event.prompt_tokens // self._block_size
        if event.role is Role.DECODE or event.attempt != 1 or not blocks:
            return
        if self._since_s is None:
            self._since_s = at_s
        if not self._arrivals or at_s - self._arrivals[-1][0] >= self._window_s / BUCKETS:
            self._arrivals.append((at_s, Counter()))
        self._arrivals[-1][1][router_id] += 1
        self._arrived[router_id] += 1
        # A router of another block size, or one that tells no depth or too many, says nothing of this cache.
        depths = told_blocks(event.prompt_tokens, self._block_size).bit_length()
        if len(event.prefix) != depths or UNKNOWN in event.prefix:
            return
        worker = WorkerKey(event.worker_id, event.dp_rank)
        self._sampled.append(_Sampled(at_s, event.prefix, worker, router_id))
        self._told[router_id] += 1
        for chain in event.prefix:
            self._sharing[chain] = self._sharing.get(chain, 0) + 1
        if len(self._sampled) > MAX_SAMPLED:
            self._let_go()

    def advance(self, at_s: float) -> None:
        """Let go of what is older than the window."""
        while self._sampled and at_s - self._sampled[0].at_s > self._window_s:
            self._let_go()
        while self._arrivals and at_s - self._arrivals[0][0] > self._window_s:
            self._arrived -= self._arrivals.popleft()[1]

    def groups(self, at_s: float, most: int) -> tuple[PrefixGroup, ...]:
        """Return the groups asked for most, most first; then the prefixes where those part.

        A request belongs to the longest prefix that another sampled request of the window has, too. Groups
        part at fewer prefixes than there are groups. With those, the blocks of a group beyond its parent's
        are no other group's, but for what several share beyond a power of two.

            rate of a group at a worker = sum over routers of
                its sampled requests there * the router's arrivals / the router's sampled / span

        Each router samples so many a second, whatever comes: one request of a busy router stands for more.
        The arrivals of a router that has told of none are spread over the others'.

        Args:     most: so many groups, not counting where they part.
        Returns:  requests per second; () before two sampled requests have begun alike.
        """
        rates: defaultdict[int, defaultdict[WorkerKey, float]] = defaultdict(lambda: defaultdict(float))
        beginnings: dict[int, tuple[int, ...]] = {}  # of each group: all depths down to its own
        sharing, each = self._sharing, self._each(at_s)
        for sampled in self._sampled:
            for depth in range(len(sampled.prefix), 0, -1):
                chain = sampled.prefix[depth - 1]
                if sharing[chain] > 1:
                    if chain not in beginnings:
                        beginnings[chain] = sampled.prefix[:depth]
                    rates[chain][sampled.worker] += each[sampled.router_id]
                    break
        first = sorted(rates, key=lambda chain: (-sum(rates[chain].values()), chain))[:most]
        return tuple(
            PrefixGroup(chain, blocks, dict(rates.get(chain, {})), parent)
            for chain, blocks, parent in _with_forks([beginnings[chain] for chain in first])
        )

    def unshared_rate(self, at_s: float) -> float:
        """Return how many requests a second begin like no other: no cache placement serves them."""
        each = self._each(at_s)
        return sum(each[one.router_id] for one in self._sampled if self._sharing[one.prefix[0]] == 1)

    def arrival_rate(self, at_s: float) -> float:
        """Return how many requests a second have a prefix at all, sampled or not."""
        span_s = self._span_s(at_s)
        return self._arrived.total() / span_s if span_s > 0 else 0.0

    def _each(self, at_s: float) -> dict[str, float]:
        """Return how many requests a second one sampled request of each router stands for."""
        rate, told_of = self.arrival_rate(at_s), sum(self._arrived[router_id] for router_id in self._told)
        return {
            router_id: rate * self._arrived[router_id] / told_of / told if told_of else 0.0
            for router_id, told in self._told.items()
        }

    def _span_s(self, at_s: float) -> float:
        return 0.0 if self._since_s is None else min(at_s - self._since_s, self._window_s)

    def _let_go(self) -> None:
        gone = self._sampled.popleft()
        self._told[gone.router_id] -= 1
        if not self._told[gone.router_id]:
            del self._told[gone.router_id]
        for chain in gone.prefix:
            self._sharing[chain] -= 1
            if not self._sharing[chain]:
                del self._sharing[chain]


def _with_forks(beginnings: list[tuple[int, ...]]) -> list[tuple[int, int, int]]:
    """Return chain, blocks and parent of some prefixes, and of those where they part.

    Args:     beginnings: of each prefix, its chains at every depth down to its own.
    """
    onward: defaultdict[int, set[int]] = defaultdict(set)
    for prefix in beginnings:
        for chain, longer in pairwise(prefix):
            onward[chain].add(longer)
    told = dict.fromkeys(prefix[-1] for prefix in beginnings)
    told |= dict.fromkeys(sorted(chain for chain, longer in onward.items() if len(longer) > 1))
    found = {}
    for prefix in beginnings:
        parent = UNKNOWN
        for index, chain in enumerate(prefix):
            if chain in told:
                found[chain] = (chain, depth_blocks(index), parent)
                parent = chain
    return [found[chain] for chain in told]
