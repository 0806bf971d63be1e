"""Which requests a workload consists of: content, load and seed brought together.

Owns: seeds; which turn of which session an arrival gets; which tenant's; a trace's halves.
Does not own: prompts and lengths (synthetic.py, trace.py), arrival instants (arrivals.py).
Invariant: the same arguments give the same requests in every process. Content and arrivals have generators of
           their own, so the same seed asks the same under another load. Seeds share no block; phases of a
           seed share their prefixes only, or a trace's ids.
"""

import heapq
import itertools
import random
from collections.abc import Iterator

import msgspec

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads import trace
from dynamo_poa.workloads.arrivals import Closed, Load, TraceTimes, instants, respaced
from dynamo_poa.workloads.request import Request
from dynamo_poa.workloads.synthetic import Blocks, Content, Mixed, Single, Trace, Turns, mean_turns
from dynamo_poa.workloads.synthetic import sessions as _sessions_of

MAX_SEED, MAX_PHASE = 2**20 - 1, 2**16 - 2


def block_tokens_of(content: Content, block_tokens: int) -> int:
    """Return how many tokens a block id of it stands for, where workers have blocks of `block_tokens`.

    A trace keeps the file's blocks: replay wants that number as `trace_block_size`, `token_ids` as it is.
    """
    return content.block_tokens if isinstance(content, Trace) else block_tokens


def requests(content: Content, load: Load, seed: int, block_tokens: int, phase: int = 0) -> Iterator[Request]:
    """Return the workload's requests: without end, but for a trace.

    In an open loop `at_s` ascends, and a session's next turn takes the first arrival after its user has
    thought; the answer before it may still be under way then, and the sender waits for it. In a closed loop
    the turns of a session stand together: a user is to have all of them (`sessions` gives them so).

    Args:     block_tokens: of the workers' blocks.
              phase: another one asks new things under the same prefixes: for a load that changes, or workers
                     that have answered this seed before and would find its prompts in their caches.
    Raises:   ConfigError, at once: a seed out of bounds, trace times without a trace, a bad trace.
    """
    if isinstance(load, Closed):
        return itertools.chain.from_iterable(sessions(content, seed, block_tokens, phase))
    _check(seed, phase)
    rng = _rng(seed, phase, "arrivals")
    if isinstance(load, TraceTimes):
        if not isinstance(content, Trace):
            raise ConfigError([f"load = {load.text!r}: must have a trace as content, not {content.name!r}"])
        rows, ahead = itertools.tee(_trace(content, seed))  # ahead by the requests of one instant
        return _timed(rows, respaced((row.at_s or 0.0 for row in ahead), load, rng))
    if isinstance(content, Trace):
        return _timed(_trace(content, seed), instants(load, rng))
    tenants = _tenants(content, seed, block_tokens, phase)
    return _open(tenants, instants(load, rng), _rng(seed, phase, "tenants"))


def sessions(content: Content, seed: int, block_tokens: int, phase: int = 0) -> Iterator[Turns]:
    """Return the workload for a closed loop: what one user asks from beginning to end, for each user in turn.

    Raises:   ConfigError, at once, on a seed out of bounds and on a bad trace.
    """
    _check(seed, phase)
    if isinstance(content, Trace):
        return ((msgspec.structs.replace(row, at_s=None),) for row in _trace(content, seed))
    tenants = _tenants(content, seed, block_tokens, phase)
    if len(tenants) == 1:
        return tenants[0].source
    return _mixed(tenants, _rng(seed, phase, "tenants"))


class _Tenant:
    """One tenant's sessions, and those of them that wait for their next turn.

    frac:   of all requests
    """

    def __init__(self, name: str, frac: float, content: Single, source: Iterator[Turns], number: int) -> None:
        self.frac, self.mean_turns = frac, mean_turns(content)
        self.source = self._named(name, source, number) if name else source
        self._waiting: list[tuple[float, int, Turns]] = []
        self._order = itertools.count()

    @staticmethod
    def _named(name: str, source: Iterator[Turns], number: int) -> Iterator[Turns]:
        """Yield sessions as this tenant's; of two, the first has the even numbers and the second the odd."""
        for turns in source:
            yield tuple(
                msgspec.structs.replace(
                    turn, tenant=name, session=turn.session if turn.session < 0 else 2 * turn.session + number
                )
                for turn in turns
            )

    def next(self, at_s: float) -> Request:
        """Return the turn that has waited longest by `at_s`, or a new session's first."""
        if self._waiting and self._waiting[0][0] <= at_s:
            _, _, turns = heapq.heappop(self._waiting)
        else:
            turns = next(self.source)
        if len(turns) > 1:
            heapq.heappush(self._waiting, (at_s + turns[1].think_s, next(self._order), turns[1:]))
        return msgspec.structs.replace(turns[0], at_s=at_s, think_s=0.0)


def _tenants(content: Single | Mixed, seed: int, block_tokens: int, phase: int) -> list[_Tenant]:
    blocks = Blocks(seed, phase)
    if isinstance(content, Mixed):
        shares = [
            ("first", 1 - content.second_frac, content.first),
            ("second", content.second_frac, content.second),
        ]
    else:
        shares = [("", 1.0, content)]
    return [
        _Tenant(
            name, frac, single, _sessions_of(single, _rng(seed, phase, name), blocks, block_tokens), number
        )
        for number, (name, frac, single) in enumerate(shares)
    ]


def _open(tenants: list[_Tenant], times_s: Iterator[float], chance: random.Random) -> Iterator[Request]:
    for at_s in times_s:
        tenant = tenants[-1] if chance.random() >= tenants[0].frac else tenants[0]
        yield tenant.next(at_s)


def _mixed(tenants: list[_Tenant], chance: random.Random) -> Iterator[Turns]:
    """Yield sessions of either tenant, so often that each has its share of the requests."""
    starts = [tenant.frac / tenant.mean_turns for tenant in tenants]
    while True:
        yield next(chance.choices(tenants, starts)[0].source)


def _trace(content: Trace, seed: int) -> Iterator[Request]:
    """Return the rows that `content` asks for, their ids the seed's own."""
    found = trace.survey(content.path, content.block_tokens).requests
    half = found // 2
    start, stop = {"all": (0, found), "first": (0, half), "second": (half, found)}[content.part]
    if content.limit:
        stop = min(stop, start + content.limit)
    if start == stop:
        raise ConfigError([f"{content.name}: holds no request: must hold one at least"])
    rows = trace.read(content.path, content.block_tokens, first_id=Blocks(seed, 0).shared(0).start)
    return itertools.islice(rows, start, stop)


def _timed(rows: Iterator[Request], times_s: Iterator[float]) -> Iterator[Request]:
    for row, at_s in zip(rows, times_s, strict=False):
        yield msgspec.structs.replace(row, at_s=at_s)


def _rng(seed: int, phase: int, purpose: str) -> random.Random:
    return random.Random(f"{seed}/{phase}/{purpose}")  # seeded by a digest: the same in every process


def _check(seed: int, phase: int) -> None:
    bounds = (("seed", seed, MAX_SEED), ("phase", phase, MAX_PHASE))
    problems = [f"{key} = {at!r}: must be in [0, {most}]" for key, at, most in bounds if not 0 <= at <= most]
    if problems:
        raise ConfigError(problems)
