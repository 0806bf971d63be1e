"""What the routers have done lately: decisions, requests in flight, time to first token, refusals.

Owns: the windows of priced decisions, of TTFT and of arrivals; how each request that ended fared; what is
      known of each router; counts of what was lost or refused, and of prompt tokens found cached.
Does not own: the wire format (wire.py), joining a request's legs (flight.py), which prompts begin alike
              (demand_groups.py), PoA-hat (estimator.py).
Invariant: bounded whatever routers send; ages are measured from local receipt, never from a sender's clock;
           bad input is counted and dropped, never raised.
Source: contract Decision of the architecture; cases S7 (clocks), S8 (refused requests).
"""

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from dynamo_poa import wire
from dynamo_poa.demand_groups import PrefixDemand
from dynamo_poa.flight import Flight, InFlight, Uncached
from dynamo_poa.frozen import PricedDecision, price
from dynamo_poa.overlap import OverlapWindow
from dynamo_poa.prompts import PromptWindow
from dynamo_poa.ttft import sample_of
from dynamo_poa.values import (
    MAX_REVISION,
    CacheView,
    Decision,
    Outcome,
    RequestOutcome,
    Role,
    TtftSample,
    WorkerKey,
)

MAX_ROUTERS = 256
MAX_REQUESTS = 100_000  # joined at once; 20 MB
MAX_SAMPLES = 50_000  # TTFT measurements in a window; a graph on one machine makes a tenth
MAX_SIZES = 1024  # prompts whose size is remembered, no longer than stale_s
MAX_OUTCOMES = 4096  # told at one tick; of more the oldest are dropped and counted
MAX_TTFT_S = 3600.0  # more is a clock, not a wait

_decode_batch = msgspec.msgpack.Decoder(wire.DecisionBatch).decode


class RouterSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What one router said last. `seen_at_s` is monotonic and ours, the rest is the router's."""

    router_id: str
    revision: int
    source: str
    dropped: int
    in_flight: dict[str, int]
    sequence: int
    sent_at_s: float
    loop_lag_s: float
    seen_at_s: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Load as the routers see it. None means that no router has been heard lately, never zero.

    in_flight:         requests whose caller still waits
    arrival_rate:      requests per second, over the window
    shed_frac:         share of the window's arrivals that were refused
    tokens_mean:       prompt tokens a request had to compute where it was sent, E[u]
    tokens_effective:  the same as seen by one who meets them in service, E[u^2]/E[u]
    arrived:           requests since the controller started
    """

    in_flight: int | None = None
    arrival_rate: float | None = None
    shed_frac: float = 0.0
    tokens_mean: float | None = None
    tokens_effective: float | None = None
    arrived: int | None = None


class DecisionLog:
    """The controller's memory of decisions.

    TTFT of a request is the first token of its answering leg (decode or aggregated) minus the receipt of its
    earliest leg known by then. With sequential hand-over over two routers, a batch of the prefill leg that
    arrives after the decode leg's first token leaves that one request's TTFT short.

    prompts:     those that came within `prompts_window_s`, and what was in flight
    outcomes:    ended legs by (role, outcome)
    refused:     messages and events not taken, by reason
    lost:        batches missing between two sequence numbers
    dropped:     events that routers say they dropped
    unrecorded:  decisions that came without candidates, as most do under load (`candidates_per_s`)
    unpriced:    decisions whose candidates are impossible, or lack the chosen worker
    untold:      outcomes of requests dropped because too many ended between two ticks
    demand:      which prefixes are asked for, over `demand_window_s`
    prompts_seen, prompt_tokens_seen, cached_tokens_seen:  since the controller started, of the legs that
                 compute prompts: decisions, their tokens, and those that the chosen worker held
    """

    def __init__(
        self,
        *,
        window: int,
        ttft_window_s: float,
        stale_s: float,
        block_size: int,
        prefill_load_scale: float = 1.0,
        answering: frozenset[Role] = frozenset({Role.DECODE, Role.AGGREGATED}),
        max_requests: int = MAX_REQUESTS,
        prompts_window_s: float = 60.0,
        demand_window_s: float = 60.0,
    ) -> None:
        self.demand = PrefixDemand(demand_window_s, block_size)
        self.prompts_seen = 0
        self.prompt_tokens_seen = 0
        self.cached_tokens_seen = 0
        self.prompts = PromptWindow(prompts_window_s)
        self.outcomes: Counter[tuple[Role, Outcome]] = Counter()
        self.refused: Counter[str] = Counter()
        self.lost = 0
        self.dropped = 0
        self.unrecorded = 0
        self.unpriced = 0
        self.untold = 0
        self.batches = 0
        self.last_batch_at_s: float | None = None
        self._window = window
        self._ttft_window_s = ttft_window_s
        self._stale_s = stale_s
        self._block_size = block_size
        self._prefill_load_scale = prefill_load_scale
        self._answering = answering
        self.flight = Flight(answering, max_requests)
        self._routers: dict[str, RouterSeen] = {}
        self._decided: dict[Role, deque[tuple[float, PricedDecision]]] = {}
        self._overlaps = OverlapWindow(window, block_size)
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._ttft_fresh = False
        self._sizes: deque[tuple[float, int]] = deque(maxlen=MAX_SIZES)  # prompt tokens to be computed
        self._outcomes: deque[RequestOutcome] = deque(maxlen=MAX_OUTCOMES)
        self._arrived = 0
        self._arrivals: deque[tuple[float, int, int]] = deque()  # per batch: at, arrived, of them shed
        self._heard_since_s: float | None = None

    def receive(self, payload: bytes, at_s: float) -> None:
        """Take a message from the decisions subject, at a monotonic instant."""
        try:
            batch = _decode_batch(payload)
        except msgspec.ValidationError:
            self.refused["schema"] += 1
        except (msgspec.DecodeError, RecursionError):  # the latter from nesting without end
            self.refused["not_msgpack"] += 1
        else:
            if batch.version > wire.VERSION:
                self.refused["version"] += 1
            elif not 0 <= batch.params_revision <= MAX_REVISION:
                self.refused["revision"] += 1  # it cannot be that of a record
            elif batch.router_id not in self._routers and len(self._routers) >= MAX_ROUTERS:
                self.refused["too_many_routers"] += 1
            else:
                self.apply(batch, at_s)

    def apply(self, batch: wire.DecisionBatch, at_s: float) -> None:
        """Take in one router's batch, received at a monotonic instant."""
        if not self._greet(batch, at_s):
            self.refused["repeated"] += 1
            return
        self.prompts.look(self._in_flight, at_s)
        self.batches += 1
        self.last_batch_at_s = at_s
        arrived = shed = 0
        for event in batch.events:
            if isinstance(event, wire.Chosen):
                arrived += self._chosen(event, batch.router_id, at_s)
            elif isinstance(event, wire.FirstToken):
                self._first_token(event, at_s)
            else:
                refused_at_door = event.outcome is Outcome.SHED and event.request_id not in self.flight
                arrived += refused_at_door
                self.outcomes[event.role, event.outcome] += 1
                shed += self._ended(event, batch.params_revision, at_s)
        if arrived or shed:
            self._arrivals.append((at_s, arrived, shed))
            self._arrived += arrived
        if not batch.events:
            # Nothing left to report and none of a leg running: the end of those we still hold was lost.
            for role in Role:
                if not batch.in_flight.get(role):
                    self.flight.end_legs(batch.router_id, role)

    def advance(self, at_s: float) -> None:
        """Let go of what is too old by now."""
        for router_id, status in list(self._routers.items()):
            if at_s - status.seen_at_s > self._stale_s:
                del self._routers[router_id]
                for role in Role:
                    self.flight.end_legs(router_id, role)
        if not self._routers:
            self._heard_since_s = None
        for window in self._decided.values():
            while window and at_s - window[0][0] > self._stale_s:
                window.popleft()
        self._overlaps.forget(at_s - self._stale_s)
        self.demand.advance(at_s)
        self.prompts.forget(at_s)
        while self._ttft and at_s - self._ttft[0][0] > self._ttft_window_s:
            self._ttft.popleft()
        while self._sizes and at_s - self._sizes[0][0] > self._stale_s:
            self._sizes.popleft()
        while self._arrivals and at_s - self._arrivals[0][0] > self._ttft_window_s:
            self._arrivals.popleft()
        self.flight.give_up(at_s - self._stale_s)

    def windows(self) -> dict[Role, Sequence[PricedDecision]]:
        """Return the priced decisions of each leg, oldest first."""
        return {role: [decision for _, decision in window] for role, window in self._decided.items()}

    def take_ttft(self) -> TtftSample:
        """Return TTFT over the window; `fresh` tells whether any came since the last call."""
        fresh, self._ttft_fresh = self._ttft_fresh, False
        return sample_of((ttft_s for _, ttft_s in self._ttft), fresh=fresh, source="decisions")

    def take_outcomes(self) -> tuple[RequestOutcome, ...]:
        """Return how the requests fared that ended since the last call, oldest first."""
        told = tuple(self._outcomes)
        self._outcomes.clear()
        return told

    def traffic(self, at_s: float) -> Traffic:
        """Return the load that the routers see."""
        if self._heard_since_s is None:
            return Traffic()
        span_s = min(self._ttft_window_s, at_s - self._heard_since_s)
        arrived = sum(count for _, count, _ in self._arrivals)
        shed = sum(count for _, _, count in self._arrivals)
        tokens = sum(size for _, size in self._sizes)
        return Traffic(
            in_flight=self._in_flight(),
            arrival_rate=arrived / span_s if span_s > 0 else None,
            shed_frac=min(shed / arrived, 1.0) if arrived else 0.0,
            arrived=self._arrived,
            tokens_mean=tokens / len(self._sizes) if tokens else None,
            tokens_effective=sum(size**2 for _, size in self._sizes) / tokens if tokens else None,
        )

    def running(self) -> dict[Role, list[InFlight]]:
        """Return the requests in flight on each leg that has had decisions."""
        return {role: self.flight.running(role) for role in self._decided}

    @property
    def forgotten(self) -> int:
        """Return how many requests were given up because too many were open."""
        return self.flight.forgotten

    @property
    def cache(self) -> CacheView:
        """Return what the window's decisions show of the prefix caches."""
        return self._overlaps.view()

    @property
    def routers(self) -> tuple[RouterSeen, ...]:
        """Return what is known of each router heard within `stale_s`."""
        return tuple(self._routers.values())

    def _in_flight(self) -> int:
        """Return how many requests are running.

        The join is exact while nothing is lost; the routers' own counts, of legs, keep it within bounds when
        something was, or began before we came: at least the answering legs, at most all of them.
        """
        by_leg = Counter[str]()
        for status in self._routers.values():
            by_leg.update(status.in_flight)
        joined = self.flight.waiting
        answering = sum(by_leg[role] for role in self._answering)
        return min(max(joined, answering), by_leg.total())

    def _greet(self, batch: wire.DecisionBatch, at_s: float) -> bool:
        """Note who speaks; tell whether the batch is new."""
        before = self._routers.get(batch.router_id)
        if before is None:
            dropped_before = 0
        elif batch.sequence > before.sequence:
            self.lost += batch.sequence - before.sequence - 1
            dropped_before = before.dropped
        elif batch.sent_at_s <= before.sent_at_s:
            return False
        else:  # the same name counts from the start again: a restarted router, whose requests died with it
            dropped_before = 0
            for role in Role:
                self.flight.end_legs(batch.router_id, role)
        self.dropped += max(batch.dropped - dropped_before, 0)
        if self._heard_since_s is None:
            self._heard_since_s = at_s
        self._routers[batch.router_id] = RouterSeen(
            router_id=batch.router_id,
            revision=batch.params_revision,
            source=batch.params_source,
            dropped=batch.dropped,
            in_flight=batch.in_flight,
            sequence=batch.sequence,
            sent_at_s=batch.sent_at_s,
            loop_lag_s=batch.loop_lag_s,
            seen_at_s=at_s,
        )
        return True

    def _chosen(self, event: wire.Chosen, router_id: str, at_s: float) -> bool:
        """Take in a decision; tell whether its request is a new one."""
        self._overlaps.add(event, at_s)
        self.demand.add(event, at_s, router_id)
        self.prompts.add(event, at_s)
        window = self._decided.setdefault(event.role, deque(maxlen=self._window))
        priced = price(
            Decision(
                request_id=event.request_id,
                role=event.role,
                decided_at_s=event.at_s,
                worker=WorkerKey(event.worker_id, event.dp_rank),
                prompt_tokens=event.prompt_tokens,
                revision=event.revision,
                candidates=event.candidates,
                received_at_s=event.received_at_s,
                attempts=event.attempt,
            ),
            block_size=self._block_size,
            prefill_load_scale=self._prefill_load_scale,
            known_workers=window[-1][1].workers if window else (),
        )
        if event.role is not Role.DECODE:
            self._sizes.append((at_s, max(event.prompt_tokens - event.cached_tokens, 1)))
            self.prompts_seen += 1
            self.prompt_tokens_seen += event.prompt_tokens
            self.cached_tokens_seen += min(event.cached_tokens, event.prompt_tokens)
        uncached = None if priced is None else Uncached(priced.workers, priced.uncached_tokens)
        is_new = self.flight.chosen(event, router_id, at_s, uncached)
        if not event.candidates:
            self.unrecorded += 1
        elif priced is None:
            self.unpriced += 1
        else:
            window.append((at_s, priced))
        return is_new

    def _first_token(self, event: wire.FirstToken, at_s: float) -> None:
        request = self.flight.first_token(event, at_s)
        if request is None:
            self.refused["unknown_request"] += 1
            return
        if event.role not in self._answering or request.answered:
            return
        request.answered = True
        ttft_s = event.at_s - request.received_at_s
        # Not clamped: a clock that jumped says nothing of the wait (S7). NaN fails the comparison too, and so
        # does 0, of which no baseline could be made.
        if not 0 < ttft_s <= MAX_TTFT_S:
            self.refused["impossible_ttft"] += 1
            return
        request.ttft_s = ttft_s
        self._ttft.append((at_s, ttft_s))
        self._ttft_fresh = True

    def _ended(self, event: wire.Ended, revision: int, at_s: float) -> bool:
        """Take in the end of a leg; tell whether its request was refused by it.

        A request has fared well when its answering leg has, and badly when any leg failed or was refused,
        which is told once: its other leg may fail or be refused, too, or not be heard of again.
        """
        request = self.flight.get(event.request_id)
        refused = self.flight.ended(event, at_s)
        if request is not None and request.told:
            return refused
        if refused or (event.outcome is Outcome.FAILED and request is not None):
            decided_at_s = at_s if request is None else request.decided_at_s
            revision = revision if request is None else request.revision
            self._tell(RequestOutcome(revision=revision, decided_at_s=decided_at_s, failed=True), event)
        elif event.outcome is Outcome.OK and event.role in self._answering and request is not None:
            e2e_s = event.at_s - request.received_at_s
            self._tell(
                RequestOutcome(
                    revision=request.revision,
                    decided_at_s=request.decided_at_s,
                    ttft_s=request.ttft_s,
                    e2e_s=e2e_s if 0 < e2e_s <= MAX_TTFT_S else None,
                ),
                event,
            )
        return refused

    def _tell(self, outcome: RequestOutcome, event: wire.Ended) -> None:
        request = self.flight.get(event.request_id)
        if request is not None:  # another leg of it may end yet
            request.told = True
        self.untold += len(self._outcomes) == MAX_OUTCOMES
        self._outcomes.append(outcome)
