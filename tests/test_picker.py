"""Which worker is picked, on fakes of the directory and the avoid list's clock."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from fakes import A, B, FakeDirectory

from dynamo_poa.avoid import AvoidList
from dynamo_poa.clock import ManualClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.errors import Unpicked
from dynamo_poa.ledger import Ledger, Ticket
from dynamo_poa.picker import Picked, Picker
from dynamo_poa.values import Candidate, Curve, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import MAX_CANDIDATES, Coefficients, PoolSpeed, WorkerSpeed

C = 3
FAST = Curve(prefill_base_s=0.002, prefill_token_s=0.0001, decode_base_s=0.006, decode_request_s=0.00025)


def slowed(factor: float) -> Curve:
    return Curve(**{name: value * factor for name, value in msgspec.structs.asdict(FAST).items()})


def card(worker_id: int, role: Role, **given: Any) -> WorkerCard:
    return WorkerCard(worker_id=worker_id, role=role, kv_block_size=16, **given)


class World:
    """A leg of three workers, coefficients in force."""

    def __init__(self, role: Role = Role.AGGREGATED, *, seed: int = 1, **cards: Any) -> None:
        self.role, self.clock = role, ManualClock()
        self.directory = FakeDirectory(*(card(worker, role, **cards) for worker in (A, B, C)))
        self.holder = CoefficientsHolder(self.clock.monotonic_s)
        self.avoid = AvoidList(15.0, self.clock)
        self.ledger = Ledger(role, self.clock)
        self.picker = Picker(
            self.ledger, self.holder, self.directory, self.avoid, self.clock, random.Random(seed)
        )
        self.say(1)

    def say(self, revision: int, *speeds: WorkerSpeed, routers: int = 1, pool: bool = True) -> None:
        pools = {self.role: PoolSpeed(curve=FAST)} if pool else {}
        self.holder.offer(
            Coefficients(
                controller_id="c",
                revision=revision,
                sent_at_s=0.0,
                routers=routers,
                pools=pools,
                workers=speeds,
            )
        )

    def pick(self, prompt_tokens: int = 200, cached: dict[int, int] | None = None, **given: Any) -> Picked:
        cached_tokens = {(worker, 0): tokens for worker, tokens in (cached or {}).items()}
        return self.picker.pick(self.picker.speeds(), prompt_tokens, None, cached_tokens, **given)

    def send(self, worker: int | None = None, prompt_tokens: int = 200) -> Ticket:
        """Enter a request, where it is picked for or on a given worker."""
        picked = self.pick(prompt_tokens).worker if worker is None else WorkerKey(worker, 0)
        return self.ledger.enter(
            picked, prompt_tokens=prompt_tokens, uncached_tokens=prompt_tokens, output_tokens=64, blocks=12
        )


async def test_equal_workers_are_loaded_equally() -> None:
    """Each pick knows of those before it."""
    world = World()
    sent = Counter(world.send().work for _ in range(30))
    assert sorted(sent.values()) == [10, 10, 10]


@pytest.mark.parametrize("role", list(Role))
async def test_an_idle_slow_worker_is_left_alone_until_the_others_are_as_dear(role: Role) -> None:
    """Its own time prices it, on every leg: 0 in flight is not cheap on one that takes five times as long."""
    world = World(role)
    world.say(2, WorkerSpeed(C, 0, slowed(5), 100.0))
    assert {world.pick().worker.worker_id for _ in range(50)} == {A, B}
    sent = Counter(world.send().work for _ in range(60))
    slow = sent[world.ledger.work(WorkerKey(C, 0))]
    assert slow < 60 / 3 * 0.5
    assert sum(sent.values()) == 60


async def test_a_slow_worker_gets_some_once_the_others_have_much() -> None:
    """In proportion to its speed, not never: twenty on each of the two others and it is the cheapest."""
    world = World(Role.DECODE)
    world.say(2, WorkerSpeed(C, 0, slowed(1.5), 100.0))
    for _ in range(20):
        world.send(A).first_token()
        world.send(B).first_token()
    assert world.pick().worker == (C, 0)


async def test_a_worker_that_has_just_joined_goes_by_its_pool() -> None:
    """An id that no coefficients name, at once and with nothing in flight."""
    world = World()
    world.say(2, *(WorkerSpeed(worker, 0, slowed(2), 100.0) for worker in (A, B)))
    assert world.pick().worker == (C, 0)


async def test_without_a_pool_an_unknown_worker_leaves_the_choice_to_dynamo() -> None:
    """Better Dynamo's selection among all than ours among some."""
    world = World()
    world.say(2, WorkerSpeed(A, 0, FAST, 100.0), WorkerSpeed(B, 0, FAST, 100.0), pool=False)
    with pytest.raises(Unpicked) as unpicked:
        world.pick()
    assert unpicked.value.reason == "unknown_worker"


async def test_a_leg_without_workers_leaves_the_choice_to_dynamo() -> None:
    """Its router may know of one a moment before discovery's cards are read."""
    world = World()
    world.directory.remove(A, B, C)
    with pytest.raises(Unpicked) as unpicked:
        world.pick()
    assert unpicked.value.reason == "unknown_worker"


async def test_the_prompt_goes_where_it_is_cached_unless_that_costs_more() -> None:
    """900 of 1000 tokens saved are 90 ms; ten requests more there cost more than that."""
    world = World()
    assert world.pick(1000, {B: 900}) == Picked(WorkerKey(B, 0), 100, ())
    for _ in range(20):
        world.send(B)
    assert world.pick(1000, {B: 900}).worker.worker_id in (A, C)


async def test_a_full_worker_is_not_picked_while_another_has_a_slot() -> None:
    """S = 4: the faster one's four slots are taken; the slower has room."""
    world = World(Role.DECODE, max_num_seqs=4)
    world.directory.remove(B)
    world.say(2, WorkerSpeed(C, 0, slowed(1.4), 100.0))
    tickets = [world.send(A) for _ in range(3)]
    assert world.pick().worker == (A, 0)
    tickets += [world.send(A)]
    assert world.pick().worker == (C, 0)


async def test_each_rank_is_a_worker_of_its_own() -> None:
    """Data-parallel ranks have their own queue and cache."""
    world = World(data_parallel_size=2)
    sent = Counter(world.pick().worker.dp_rank for _ in range(200))
    assert min(sent.values()) > 50
    assert set(sent) == {0, 1}


async def test_a_tried_worker_and_one_to_be_avoided_come_last() -> None:
    """Well and untried; then well; then untried: it may be back. Source: Trip._book does the same."""
    world = World()
    world.avoid.add(A)
    picks = {world.pick(tried={B}).worker.worker_id for _ in range(20)}
    assert picks == {C}
    world.directory.remove(C)
    assert world.pick(tried={B}).worker == (B, 0)
    world.avoid.add(B)
    assert world.pick(tried={B}).worker == (A, 0)
    assert {world.pick(tried={A, B}).worker.worker_id for _ in range(20)} == {A, B}


async def test_a_prefill_worker_without_an_address_is_no_choice_where_legs_meet() -> None:
    """Its decode worker could not find it."""
    world = World(Role.PREFILL)
    world.directory.put(card(B, Role.PREFILL, bootstrap_host="127.0.0.1", bootstrap_port=7002))
    assert {world.pick(reachable=True).worker.worker_id for _ in range(20)} == {B}
    assert {world.pick().worker.worker_id for _ in range(60)} == {A, B, C}


async def test_equal_costs_are_decided_by_chance_and_repeatably() -> None:
    """The same seed, the same picks; all three come up."""
    picks = [[World(seed=seed).pick().worker.worker_id for seed in range(40)] for _ in range(2)]
    assert picks[0] == picks[1]
    assert set(picks[0]) == {A, B, C}


async def test_a_worker_that_is_silent_while_others_go_on_is_not_picked() -> None:
    """R6: from 0.3 s on it costs the silence on top; what it has in flight stays its."""
    world = World(Role.DECODE)
    world.directory.remove(C)
    sent = {worker: [world.send(worker) for _ in range(4)] for worker in (A, B)}
    sent[B] += [world.send(B) for _ in range(4)]
    for ticket in sent[A] + sent[B]:
        ticket.first_token()
    assert world.pick().worker == (A, 0)
    for _ in range(10):
        await world.clock.advance(0.1)
        sent[B][0].work.moved()
    assert world.pick().worker == (B, 0)


async def test_where_nothing_at_all_came_for_a_while_the_first_that_moves_is_not_preferred() -> None:
    """A pause of this process, or of all workers: A has less to do and is picked, though B is read first."""
    world = World(Role.DECODE)
    world.directory.remove(C)
    sent = {worker: [world.send(worker) for _ in range(4)] for worker in (A, B)}
    sent[B] += [world.send(B) for _ in range(4)]
    for ticket in sent[A] + sent[B]:
        ticket.first_token()
    await world.clock.advance(1.0)
    sent[B][0].work.moved()
    assert world.pick().worker == (A, 0)


async def test_a_worker_that_stalls_gets_little_and_is_used_again_when_it_is_well() -> None:
    """R6, simulated: 2 s in every 6; then 20 s of peace, and it has its share again."""
    world = World(Role.DECODE)
    rng, in_flight, shares = random.Random(5), list[tuple[float, Ticket]](), list[list[int]]()

    async def run(seconds: int, *, stalls: bool) -> None:
        nonlocal in_flight
        for tick in range(seconds * 20):
            await world.clock.advance(0.05)
            now_s = world.clock.monotonic_s()
            world.say(int(now_s * 1000))
            stopped = stalls and tick * 0.05 % 6 < 2
            stuck = world.ledger.work(WorkerKey(C, 0))
            for _, ticket in in_flight:
                if not (stopped and ticket.work is stuck):
                    ticket.work.moved()
                    ticket.first_token()
            done = [(s, t) for s, t in in_flight if s <= now_s and not (stopped and t.work is stuck)]
            for due in done:
                due[1].end()
            in_flight = [entry for entry in in_flight if entry not in done]
            for _ in range(2):
                ticket = world.send()
                in_flight.append((now_s + rng.uniform(0.3, 0.6), ticket))
                shares[-1].append(int(ticket.work is stuck))

    shares.append([])
    await run(60, stalls=True)
    assert sum(shares[0]) / len(shares[0]) < 0.7 / 3
    await run(20, stalls=False)
    shares.append([])
    await run(10, stalls=False)
    assert sum(shares[1]) / len(shares[1]) > 0.7 / 3


async def test_a_worker_too_dear_for_all_is_tried_now_and_then() -> None:
    """Else nobody would learn that it is well again: once in 256 picks, and after 15 s without a request."""
    world = World(Role.DECODE)
    world.say(2, WorkerSpeed(C, 0, slowed(50), 100.0))

    async def picks(count: int, pause_s: float) -> list[int]:
        found = []
        for _ in range(count):
            await world.clock.advance(pause_s)
            world.say(int(world.clock.monotonic_s() * 1000), WorkerSpeed(C, 0, slowed(50), 100.0))
            ticket = world.send()
            found.append(int(ticket.work is world.ledger.work(WorkerKey(C, 0))))
            ticket.end()
        return found

    slowly = await picks(600, 0.1)
    assert [number for number, probe in enumerate(slowly) if probe] == [255, 511]
    fast = await picks(3000, 0.01)
    assert sum(fast) == 2
    world.say(10**9)
    assert {world.pick().worker.worker_id for _ in range(40)} == {A, B, C}


async def test_with_several_routers_the_others_requests_count_too() -> None:
    """Ten of another router's on A and B; of ours there are none."""
    world = World(Role.DECODE)
    busy = [WorkerSpeed(worker, 0, FAST, 100.0, 10, 2000, 0, 0) for worker in (A, B)]
    world.say(2, *busy, routers=4)
    assert world.pick().worker == (C, 0)
    world.say(3, *busy, routers=1)
    assert {world.pick().worker.worker_id for _ in range(40)} == {A, B, C}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.AGGREGATED])
async def test_a_worker_we_have_left_alone_is_not_overdue_with_what_others_have_there(role: Role) -> None:
    """A minute without a request of ours: C's two prompts of another router are two, not a minute's wait."""
    world = World(role)
    world.pick()  # all three are seen
    await world.clock.advance(60.0)
    world.say(2, WorkerSpeed(C, 0, FAST, 100.0, 0, 0, 2, 400), routers=2)
    for _ in range(3):
        world.send(A)
        world.send(B)
    assert world.pick().worker == (C, 0)


async def test_workers_of_another_leg_are_not_taken_into_this_ones_ledger() -> None:
    """Coefficients name all workers there are."""
    world = World(Role.DECODE)
    world.directory.put(card(C, Role.PREFILL))
    world.say(2, WorkerSpeed(C, 0, FAST, 100.0, 10, 2000, 0, 0), routers=2)
    assert world.ledger.work(WorkerKey(C, 0)).foreign is None


async def test_candidates_are_recorded_as_dynamo_would_tell_them() -> None:
    """Loads before this request, what the prompt adds, blocks of 16; off the decode leg what is cached."""
    world = World()
    world.send(A, prompt_tokens=200)
    picked = world.pick(100, {B: 64}, record=True)
    assert picked.candidates == (
        Candidate(A, 0, 100, 200, 12, 1, 6),
        Candidate(B, 0, 36, 0, 0, 0, 6),
        Candidate(C, 0, 100, 0, 0, 0, 6),
    )
    decode = World(Role.DECODE).pick(100, record=True)
    assert [candidate.uncached_tokens for candidate in decode.candidates] == [0, 0, 0]


async def test_more_candidates_than_a_decision_may_name_are_not_recorded() -> None:
    """The controller would refuse the whole batch."""
    world = World(data_parallel_size=342)
    assert len(world.directory.ranks(Role.AGGREGATED)) == MAX_CANDIDATES + 2
    assert world.pick(record=True).candidates == ()
    world.directory.remove(C)
    assert len(world.pick(record=True).candidates) == 684


async def test_an_avoided_worker_is_a_choice_again_when_its_time_is_over() -> None:
    """By itself: nobody else need have failed since."""
    world = World()
    world.avoid.add(A)
    assert world.avoid.any()
    assert {world.pick().worker.worker_id for _ in range(40)} == {B, C}
    await world.clock.advance(15.0)
    world.say(2)
    assert not world.avoid.any()
    assert {world.pick().worker.worker_id for _ in range(40)} == {A, B, C}


async def test_a_request_is_not_expected_to_make_more_than_it_asks_for() -> None:
    """min(pool's mean, max_tokens); 64 where the pool's is not known."""
    world = World()
    assert [world.picker.output_tokens(most) for most in (None, 10, 1000)] == [64, 10, 64]


async def test_where_dynamos_queue_is_wanted_nothing_is_picked() -> None:
    """Its limits are its own selection's."""
    world = World()
    world.picker.refusal = "queue_policy"
    with pytest.raises(Unpicked) as unpicked:
        world.picker.speeds()
    assert unpicked.value.reason == "queue_policy"
