"""What this router has in flight on each worker of one leg, and how the worker gets on with it.

Owns: live counts per worker, entered when a worker is chosen and taken back when the request ends; arrivals;
      when a worker last showed progress, and the stalls it had; what other routers have there.
Does not own: what it costs (marginal.py), who is chosen (picker.py), Dynamo's own book-keeping (booking.py).
Invariant: whatever becomes of a request, what it was entered with is taken back once. With nothing in flight
           all counts are exactly 0. Nothing waits.
Source: case R6: a worker that stops for seconds holds what it has, and nobody tells Dynamo's router.
"""

import math
from collections.abc import Callable, Collection, Iterable

from dynamo_poa.clock import Clock
from dynamo_poa.marginal import MIN_GAP_S, Load, Loads, patience_s
from dynamo_poa.values import Curve, Role, WorkerKey
from dynamo_poa.wire import WorkerSpeed

STALL_HALF_LIFE_S = 8.0  # of what is remembered: a worker that is well again is used again in two or three
# Stalls that come regularly are awaited: memory fades once the next is overdue by half their distance.
OVERDUE_FACTOR, MOST_AWAITED_S = 1.5, 30.0
IDLE_S = 1.0  # nothing came for longer: there is no traffic
ARRIVALS_S = 10.0  # arrivals are counted over about so long
BURST_S = 0.004  # what a pass brings forth comes at once; a longer pause is the next pass
MEAN_WEIGHT = 0.05  # of the latest request in the mean over requests
SPARE = 16  # workers that have gone and are kept, at most, beside as many as there are
MANY = 4096  # works are looked through for some to let go, whoever is there: other routers may name anybody


_NOTHING = Loads()


class Work:
    """One worker's load (marginal.Load), as this router sees it.

    joining, joining_tokens:  waiting requests that came since the worker began its pass, and their prompts
    blocks:    full KV blocks of the prompts in flight, as Dynamo's router counts them
    curve:     its speed when it was last a candidate; None before, and then no silence is judged
    entered_at_s:  when it was last sent a request, or first seen
    moved_at_s:  when it last showed progress, or had nothing to show
    beside:    the same worker in the ledger of other routers' requests; None where that is not complete
    foreign:   what other routers have there by the worker's own word, for want of `beside`; None with one
    """

    __slots__ = (
        "_ledger",
        "_now_s",
        "_stalled_s",
        "_stalls",
        "_stalls_at_s",
        "_stalls_awaited_s",
        "beside",
        "blocks",
        "curve",
        "entered_at_s",
        "foreign",
        "joining",
        "joining_tokens",
        "kv_tokens",
        "moved_at_s",
        "passes",
        "queued_tokens",
        "running",
        "waiting",
    )

    def __init__(self, ledger: "Ledger", now_s: Callable[[], float]) -> None:
        self._ledger, self._now_s = ledger, now_s
        # Whole numbers: adding and taking back floats would leave dust.
        self.running = self.waiting = self.queued_tokens = self.kv_tokens = self.blocks = 0
        self.joining = self.joining_tokens = self.passes = 0
        self.curve: Curve | None = None
        self.foreign: Loads | None = None
        self.beside: Work | None = None
        self.moved_at_s = self.entered_at_s = now_s()
        self._stalls = self._stalled_s = (
            0.0  # how many, and their time, each counting half after the half-life
        )
        self._stalls_at_s = -math.inf
        self._stalls_awaited_s = 0.0

    def moved(self) -> None:
        """Note progress. Once per chunk, so next to nothing is done."""
        now_s = self._now_s()
        if now_s - self.moved_at_s > BURST_S:
            self._pass_ended(now_s)
        self.moved_at_s = now_s

    def _pass_ended(self, now_s: float) -> None:
        """Note that the worker has begun its next pass: it has taken in all that waited."""
        self._ledger.looked(now_s)
        if now_s - self.moved_at_s > MIN_GAP_S:
            self._ledger.resumed(self, now_s)
        if self.joining:
            self.joining = self.joining_tokens = 0
            self.passes += 1

    def left(self, started: bool) -> None:
        """Count one request less. The last may go in silence: the worker then looks idle, and is not well."""
        now_s = self._now_s()
        if now_s - self.moved_at_s > MIN_GAP_S and self.running + self.waiting == 1:
            self._ledger.resumed(self, now_s)
        if started:
            self.running -= 1
        else:
            self.waiting -= 1

    @property
    def has_stalled(self) -> bool:
        """Tell whether it ever did."""
        return self._stalls > 0

    @property
    def busy(self) -> bool:
        """Tell whether it has something to show progress of."""
        if self._ledger.role is Role.DECODE:
            return self.running > 0  # what waits is with a prefill worker still
        # A prefill worker whose prompts are computed has no more to show.
        return self.waiting > 0 or (self.running > 0 and self._ledger.role is Role.AGGREGATED)

    @property
    def empty(self) -> bool:
        """Tell whether this router has nothing there."""
        return not (self.running or self.waiting)

    def all(self) -> Loads:
        """Return this router's load and the others'."""
        other: Load = self.beside or self.foreign or _NOTHING
        return Loads(
            self.running + other.running,
            self.waiting + other.waiting,
            self.queued_tokens + other.queued_tokens,
            self.kv_tokens + other.kv_tokens,
            self.joining + other.joining,
            self.joining_tokens + other.joining_tokens,
            max(self.moved_at_s, other.moved_at_s),
        )

    def note_stall(self, stall_s: float, now_s: float) -> None:
        """Remember a stall that has ended."""
        at_s = self._ledger.lived_s(now_s)
        age_s = at_s - self._stalls_at_s
        kept = _kept(age_s)
        self._stalls, self._stalled_s = self._stalls * kept + 1, self._stalled_s * kept + stall_s
        awaited_s = OVERDUE_FACTOR * age_s
        self._stalls_at_s, self._stalls_awaited_s = at_s, awaited_s if awaited_s <= MOST_AWAITED_S else 0.0

    def stalls(self, now_s: float) -> tuple[float, float]:
        """Return the share of time it is stalled, by what is remembered, and a stall's mean length.

        Memory fades while there is traffic: without any nobody learns that the worker is well again.
        """
        if not self._stalls:
            return 0.0, 0.0
        fading_s = max(self._ledger.lived_s(now_s) - self._stalls_at_s - self._stalls_awaited_s, 0.0)
        stalled_frac = self._stalled_s * _kept(fading_s) * math.log(2) / STALL_HALF_LIFE_S
        return min(stalled_frac, 1.0), self._stalled_s / self._stalls


def _kept(age_s: float) -> float:
    """Return what is left of a memory of so long ago."""
    return float(0.5 ** (age_s / STALL_HALF_LIFE_S))


class Ticket:
    """One request's entry; it knows what to take back."""

    __slots__ = ("_blocks", "_ended", "_kv_tokens", "_pass", "_started", "_uncached_tokens", "work")

    def __init__(self, work: Work, uncached_tokens: int, kv_tokens: int, blocks: int, *, joins: bool) -> None:
        self.work = work
        self._pass = work.passes if joins else -1  # the one it waits for the end of
        self._uncached_tokens, self._kv_tokens, self._blocks = uncached_tokens, kv_tokens, blocks
        self._started = self._ended = False

    def first_token(self) -> None:
        """Note that the prompt is computed; once, and not after the end."""
        if self._started or self._ended:
            return
        self._started, work = True, self.work
        work.moved()
        self._begun()
        work.waiting -= 1
        work.queued_tokens -= self._uncached_tokens
        work.running += 1

    def _begun(self) -> None:
        """Take it out of those that wait for the next pass, if it is one of them."""
        work = self.work
        if self._pass == work.passes:
            self._pass = -1
            work.joining -= 1
            work.joining_tokens -= self._uncached_tokens

    def end(self) -> None:
        """Take all back; once."""
        if self._ended:
            return
        self._ended, work = True, self.work
        work.left(self._started)
        if not self._started:
            self._begun()
            work.queued_tokens -= self._uncached_tokens
        work.kv_tokens -= self._kv_tokens
        work.blocks -= self._blocks


class Ledger:
    """The works of one leg.

    stalls:  how many were noticed
    """

    def __init__(self, role: Role, clock: Clock) -> None:
        self.role = role
        self.stalls = 0
        self._now_s = clock.monotonic_s
        self._works: dict[WorkerKey, Work] = {}
        self._alive: Collection[WorkerKey] = ()
        self._many = MANY
        self._arrivals_per_s = 0.0
        self._uncached_tokens = self._kv_tokens = 0.0  # of a request, means
        self._arrived_at_s = self._looked_at_s = clock.monotonic_s()
        self._idle_s = 0.0  # in which nothing came, in all
        self._paused_s = (-math.inf, -math.inf)  # from and to: when nothing at all came for long, last

    @property
    def kept(self) -> int:
        """Return how many workers are kept."""
        return len(self._works)

    def work(self, key: WorkerKey) -> Work:
        """Return a worker's; one not seen before has nothing in flight."""
        work = self._works.get(key)
        if work is None:
            if len(self._works) >= self._many:
                self._let_go()
                self._many = max(MANY, 2 * len(self._works))
            work = self._works[key] = Work(self, self._now_s)
        return work

    def enter(
        self, key: WorkerKey, *, prompt_tokens: int, uncached_tokens: int, output_tokens: float, blocks: int
    ) -> Ticket:
        """Count a request as a worker's, until its ticket ends."""
        work, now_s = self.work(key), self._now_s()
        self.looked(now_s)
        kept = math.exp(-max(now_s - self._arrived_at_s, 0.0) / ARRIVALS_S)
        self._arrivals_per_s, self._arrived_at_s = self._arrivals_per_s * kept + 1 / ARRIVALS_S, now_s
        joins = work.busy and self.role is not Role.DECODE
        if not work.busy:
            work.moved_at_s = now_s  # it had nothing to show, and begins at once
        if joins:
            work.joining += 1
            work.joining_tokens += uncached_tokens
        work.entered_at_s = now_s
        kv_tokens = prompt_tokens + int(output_tokens) // 2
        weight = MEAN_WEIGHT if self._kv_tokens else 1.0
        self._uncached_tokens += weight * (uncached_tokens - self._uncached_tokens)
        self._kv_tokens += weight * (kv_tokens - self._kv_tokens)
        work.waiting += 1
        work.queued_tokens += uncached_tokens
        work.kv_tokens += kv_tokens
        work.blocks += blocks
        return Ticket(work, uncached_tokens, kv_tokens, blocks, joins=joins)

    def arrivals_per_s(self) -> float:
        """Return how many requests this leg gets from this router, mean over the last while."""
        age_s = max(self._now_s() - self._arrived_at_s, 0.0)
        return self._arrivals_per_s * math.exp(-age_s / ARRIVALS_S)

    def latest_s(self) -> float:
        """Return when any worker last showed progress: nobody is silent for longer than until then."""
        return max((work.moved_at_s for work in self._works.values()), default=-math.inf)

    def looked(self, now_s: float) -> None:
        """Note that something came. Where nothing at all did for long, this process has not looked.

        Or all workers of a machine stood still at once: what comes then comes from one after the other, and
        the first must not make the others look silent.
        """
        if now_s - self._looked_at_s > MIN_GAP_S:
            before_s = max(self._looked_at_s, self.latest_s())  # of a burst only the first chunk looks
            if now_s - before_s > MIN_GAP_S:
                self._paused_s = (before_s, now_s)
            self._idle_s += max(now_s - before_s - IDLE_S, 0.0)
        self._looked_at_s = now_s

    def lived_s(self, now_s: float) -> float:
        """Return an instant on a clock that stands still while nothing comes."""
        since_s = now_s - max(self._looked_at_s, self.latest_s())
        return now_s - self._idle_s - max(since_s - IDLE_S, 0.0)

    def silent_s(self, work: Work, until_s: float) -> float:
        """Return for how long a worker had shown nothing at an instant, without the last pause of all."""
        from_s, to_s = self._paused_s
        paused_s = min(to_s, until_s) - max(from_s, work.moved_at_s)
        return until_s - work.moved_at_s - max(paused_s, 0.0)

    def resumed(self, work: Work, now_s: float) -> None:
        """Judge a silence that has just ended: it is remembered when it was a stall."""
        if work.curve is None or not work.busy:
            return
        others = [other.moved_at_s for other in self._works.values() if other is not work]
        silent_s = self.silent_s(work, max(others, default=-math.inf))
        if silent_s > patience_s(self.role, work.curve, work.all()):
            self.stalls += 1
            work.note_stall(self.silent_s(work, now_s), now_s)

    def take_totals(self, speeds: Iterable[WorkerSpeed], routers: int) -> None:
        """Take over what workers say they carry: what is not ours is other routers'. With one router none is.

        Requests are counted, and taken to be as large as ours: workers tell raw prompt tokens of what waits,
        cached or not, and nothing of what will be decoded. Held until the next word; what is not said is
        none.
        """
        for work in self._works.values():
            work.foreign = None
        if routers <= 1:
            return
        for said in speeds:
            work = self.work(WorkerKey(said.worker_id, said.dp_rank))
            running = said.running_requests or 0
            waiting = said.queued_requests or 0
            if self.role is Role.DECODE:  # what waits here may not have reached the worker yet
                running, waiting = max(0, running + waiting - work.running - work.waiting), 0
            else:
                running, waiting = max(0, running - work.running), max(0, waiting - work.waiting)
            if not said.queued_prefill_tokens:
                waiting = 0  # measured: prompts that are computed and not yet handed over count as queued
            kv_tokens = (running + waiting) * self._kv_tokens
            queued_tokens = waiting * self._uncached_tokens
            work.foreign = Loads(running, waiting, queued_tokens, kv_tokens, moved_at_s=self._now_s())

    def forget(self, alive: Collection[WorkerKey]) -> None:
        """Let go of workers that have left, once there are many of them; requests still there keep theirs."""
        self._alive = alive
        if len(self._works) > 2 * len(alive) + SPARE:
            self._let_go()

    def _let_go(self) -> None:
        works, alive = self._works, self._alive
        self._works = {key: work for key, work in works.items() if key in alive or not work.empty}

    def in_flight(self) -> Loads:
        """Return the sum over workers."""
        works = self._works.values()
        return Loads(
            sum(work.running for work in works),
            sum(work.waiting for work in works),
            sum(work.queued_tokens for work in works),
            sum(work.kv_tokens for work in works),
            sum(work.joining for work in works),
            sum(work.joining_tokens for work in works),
        )
