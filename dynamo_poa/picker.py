"""Which worker a request of one leg is pinned to, by marginal cost.

Owns: who may be chosen, what is known of each of them, what its stalls add to its cost, and that nobody is
      left unheard of.
Does not own: the cost (marginal.py), what is in flight (ledger.py), the speeds (coefficients.py), the booking
              (booking.py), whether requests go by marginal cost at all (the parameters in force, trip.py).
Invariant: picks without waiting, from what is known at that instant; the caller enters the pick before it
           waits for anything.
Source: theory.md, Marginal-cost routing.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import Clock
from dynamo_poa.coefficients import CoefficientsHolder, Speeds
from dynamo_poa.errors import Unpicked
from dynamo_poa.ledger import Ledger, Work
from dynamo_poa.marginal import (
    COST,
    MIN_GAP_S,
    Ask,
    Load,
    Room,
    backlog_s,
    choose,
    iteration_s,
    patience_s,
    stalls_cost_s,
)
from dynamo_poa.neighbours import Neighbours
from dynamo_poa.values import Candidate, Curve, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import MAX_CANDIDATES

# A worker that is dear to all gets nothing, so nobody learns when it is well again. After PROBE_S without a
# request it gets one, at most one in PROBE_PICKS of the leg's: too few to show in a P99.
PROBE_S = 15.0
PROBE_PICKS = 256


class Ranks(Protocol):
    """Who is alive, by model card: dynamo_host.WorkerDirectory."""

    def ranks(self, role: Role) -> Sequence[tuple[WorkerKey, WorkerCard]]:
        """Return all ranks of a role; the same object until something changes."""
        ...

    def card(self, worker_id: int) -> WorkerCard | None:
        """Return a worker's card."""
        ...


class Picked(NamedTuple):
    """A worker, and what was known of all when it was picked: in the order of Ranks.ranks."""

    worker: WorkerKey
    uncached_tokens: int
    candidates: tuple[Candidate, ...]


class Picker:
    """Picks for one leg.

    refusal:  why requests never go by marginal cost here, whatever the parameters say; empty when they may

    Args:     neighbours: the other routers' requests; None for the only router.
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: CoefficientsHolder,
        directory: Ranks,
        avoid: AvoidList,
        clock: Clock,
        rng: random.Random,
        *,
        refusal: str = "",
        neighbours: Neighbours | None = None,
    ) -> None:
        self.ledger, self.refusal = ledger, refusal
        self._role, self._holder, self._directory, self._avoid = ledger.role, holder, directory, avoid
        self._now_s, self._rng, self._neighbours = clock.monotonic_s, rng, neighbours
        self._ranks: Sequence[tuple[WorkerKey, WorkerCard]] = ()
        self._rows: list[tuple[WorkerKey, WorkerCard, Room]] = []
        self._picks = 0  # since the last probe
        holder.on_taken(self._take_totals)

    def speeds(self) -> Speeds:
        """Return the speeds to go by.

        Raises:  Unpicked when there are none, or requests may not go by them.
        """
        if self.refusal:
            raise Unpicked(self.refusal)
        return self._holder.speeds()

    def pick(
        self,
        speeds: Speeds,
        prompt_tokens: int,
        most_output_tokens: int | None,
        cached_tokens: Mapping[tuple[int, int], int],
        *,
        tried: Collection[int] = (),
        reachable: bool = False,
        record: bool = False,
    ) -> Picked:
        """Return the worker that costs least.

        Args:     cached_tokens: of the prompt, by rank; absent is none.
                  tried: workers that another comes before.
                  reachable: only a worker whose card says where decode workers find it is well.
                  record: also tell all candidates, unless they are more than a decision may name.
        Raises:   Unpicked when there is no worker, or one of which no speed is known.
        """
        role, now_s, rows = self._role, self._now_s(), self._live()
        if not rows:
            raise Unpicked("unknown_worker", "discovery lists none")
        ask = Ask(
            prompt_tokens,
            self.output_tokens(most_output_tokens),
            self.ledger.arrivals_per_s() * speeds.routers / len(rows),
            now_s,
        )
        cost, work_of, latest_s = COST[role], self.ledger.work, self.ledger.latest_s()
        beside = self._beside(speeds.routers)
        costs_s = []
        for key, _, room in rows:
            curve = speeds.curve(key, role)
            if curve is None:
                raise Unpicked("unknown_worker", str(key.worker_id))
            work = work_of(key)
            work.curve = curve
            work.beside = None if beside is None else beside.work(key)
            load: Load = work if work.beside is None and work.foreign is None else work.all()
            uncached_tokens = max(prompt_tokens - cached_tokens.get(key, 0), 0)
            cost_s = cost(curve, load, uncached_tokens, ask, room)
            if work.has_stalled or (latest_s - work.moved_at_s > MIN_GAP_S and work.busy):
                cost_s += self._stalls_s(work, load, curve, ask, room, now_s, latest_s)
            costs_s.append(cost_s)
        places = self._well(rows, tried, reachable=reachable)
        self._picks += 1
        place = self._unheard_of(rows, places, now_s)
        if place is None:
            place = places[choose([costs_s[well] for well in places], self._rng)]
        key = rows[place][0]
        record = record and len(rows) <= MAX_CANDIDATES
        candidates = self._candidates(rows, prompt_tokens, cached_tokens) if record else ()
        return Picked(key, max(prompt_tokens - cached_tokens.get(key, 0), 0), candidates)

    def output_tokens(self, most: int | None) -> float:
        """Return how many tokens a request will make that asks for `most` at most, as far as is known."""
        expected = self._holder.latest_output_tokens(self._role)
        return expected if most is None else min(expected, most)

    def blocks(self, worker_id: int, tokens: int) -> int:
        """Return how many full blocks of a worker's cache a prompt is."""
        card = self._directory.card(worker_id)
        return 0 if card is None else tokens // card.kv_block_size

    def _beside(self, routers: int) -> Ledger | None:
        """Return the other routers' requests, if all of them are heard."""
        if routers <= 1 or self._neighbours is None or not self._neighbours.heard(routers):
            return None
        return self._neighbours.ledgers[self._role]

    def _live(self) -> list[tuple[WorkerKey, WorkerCard, Room]]:
        ranks = self._directory.ranks(self._role)
        if ranks is not self._ranks:
            self._ranks, self._rows = ranks, [(key, card, _room(card)) for key, card in ranks]
            alive = {key for key, _ in ranks}
            self.ledger.forget(alive)
            if self._neighbours is not None:
                self._neighbours.ledgers[self._role].forget(alive)
        return self._rows

    def _well(
        self, rows: list[tuple[WorkerKey, WorkerCard, Room]], tried: Collection[int], *, reachable: bool
    ) -> list[int]:
        """Return the places of those that may be chosen.

        Second best is one that was tried in vain but is well, then one to be avoided that was not tried: it
        may be back.
        """
        everyone = list(range(len(rows)))
        reachable = reachable and self._role is Role.PREFILL
        if not tried and not reachable and not self._avoid.any():
            return everyone
        untried = [place for place in everyone if rows[place][0].worker_id not in tried]
        well = [
            place
            for place in everyone
            if rows[place][0].worker_id not in self._avoid
            and not (reachable and rows[place][1].bootstrap_port is None)
        ]
        both = [place for place in well if rows[place][0].worker_id not in tried] if tried else well
        return both or well or untried or everyone

    def _unheard_of(
        self, rows: list[tuple[WorkerKey, WorkerCard, Room]], places: list[int], now_s: float
    ) -> int | None:
        """Return the place of the worker that has been without requests longest, if one is due."""
        if self._picks < PROBE_PICKS:
            return None
        works = {place: self.ledger.work(rows[place][0]) for place in places}
        idle = [place for place, work in works.items() if work.empty]
        longest = min(idle, key=lambda place: works[place].entered_at_s, default=None)
        if longest is None or now_s - works[longest].entered_at_s < PROBE_S:
            return None
        self._picks = 0
        return longest

    def _stalls_s(
        self,
        work: Work,
        load: Load,
        curve: Curve,
        ask: Ask,
        room: Room,
        now_s: float,
        latest_s: float,
    ) -> float:
        """Return what a worker's silence costs, and the stalls it is known for."""
        cost_s = 0.0
        if work.busy and self.ledger.silent_s(work, latest_s) > patience_s(self._role, curve, load):
            cost_s = now_s - work.moved_at_s  # it may well last as long again
        stalled_frac, mean_stall_s = work.stalls(now_s)
        if stalled_frac:
            if self._role is Role.PREFILL:
                busy_s = backlog_s(curve, load)
            else:
                kv_tokens = min(load.kv_tokens + ask.prompt_tokens, room.kv_tokens)
                busy_s = ask.output_tokens * iteration_s(
                    curve, load.running + load.waiting + 1, kv_tokens, room
                )
            cost_s += stalls_cost_s(stalled_frac, mean_stall_s, busy_s)
        return cost_s

    def _candidates(
        self,
        rows: list[tuple[WorkerKey, WorkerCard, Room]],
        prompt_tokens: int,
        cached_tokens: Mapping[tuple[int, int], int],
    ) -> tuple[Candidate, ...]:
        """Return the loads as Dynamo's own router would tell them, as far as this router knows."""
        found = []
        for key, card, _ in rows:
            work = self.ledger.work(key)
            uncached_tokens = max(prompt_tokens - cached_tokens.get(key, 0), 0)
            found.append(
                Candidate(
                    worker_id=key.worker_id,
                    dp_rank=key.dp_rank,
                    uncached_tokens=0 if self._role is Role.DECODE else uncached_tokens,
                    queued_prefill_tokens=work.queued_tokens,
                    decode_blocks=work.blocks,
                    active_requests=work.running + work.waiting,
                    added_blocks=prompt_tokens // card.kv_block_size,
                )
            )
        return tuple(found)

    def _take_totals(self, speeds: Speeds) -> None:
        role, card = self._role, self._directory.card
        of_ours = (
            said
            for said in speeds.message.workers
            if (its := card(said.worker_id)) is not None and its.role is role
        )
        self.ledger.take_totals(of_ours, speeds.routers)


def _room(card: WorkerCard) -> Room:
    room = Room()
    if card.max_num_seqs is not None:
        room = room._replace(requests=card.max_num_seqs)
    if card.total_kv_blocks is not None:
        room = room._replace(kv_tokens=card.total_kv_blocks * card.kv_block_size)
    if card.max_num_batched_tokens is not None:
        room = room._replace(batch_tokens=card.max_num_batched_tokens)
    return room
