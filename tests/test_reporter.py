"""Decision events leave in batches and never hold a request up."""

import msgspec

from dynamo_poa.clock import ManualClock
from dynamo_poa.errors import BusError
from dynamo_poa.reporter import DecisionReporter, RouterStatus
from dynamo_poa.values import Outcome, Role
from dynamo_poa.wire import DecisionBatch, Ended


class Sink:
    def __init__(self) -> None:
        self.batches: list[DecisionBatch] = []
        self.up = True

    async def publish(self, subject: str, data: bytes) -> None:
        if not self.up:
            raise BusError("away")
        assert subject == "poa.poa.decisions"
        self.batches.append(msgspec.msgpack.decode(data, type=DecisionBatch))


def reporter(sink: Sink, clock: ManualClock, queue_size: int = 100) -> DecisionReporter:
    return DecisionReporter(
        sink,
        "poa",
        "router-0",
        lambda: RouterStatus(in_flight={"decode": 2}, params_revision=5, params_source="heartbeat"),
        clock=clock,
        batch_s=0.05,
        batch_size=64,
        queue_size=queue_size,
    )


def ended(number: int) -> Ended:
    return Ended(request_id=str(number), role=Role.DECODE, at_s=float(number), outcome=Outcome.OK)


def events_of(sink: Sink) -> list[str]:
    return [event.request_id for batch in sink.batches for event in batch.events]


async def test_events_leave_within_the_batch_period_in_order() -> None:
    """Batched every 50 ms."""
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock) as out:
        await clock.advance(0.06)
        sink.batches.clear()
        for number in range(3):
            out.add(ended(number))
        await clock.advance(0.05)
        assert len(sink.batches) == 1
        assert events_of(sink) == ["0", "1", "2"]
        assert sink.batches[0].params_revision == 5
        assert sink.batches[0].in_flight == {"decode": 2}


async def test_a_full_batch_leaves_at_once() -> None:
    """Batched every 50 ms or 64 events, whichever is first."""
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock) as out:
        await clock.advance(0.051)
        sink.batches.clear()
        for number in range(64):
            out.add(ended(number))
        await clock.advance(0.0)
        assert [len(batch.events) for batch in sink.batches] == [64]


async def test_an_idle_router_says_once_a_second_that_it_lives() -> None:
    """The controller sees each router's revision without traffic."""
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock):
        await clock.advance(3.2)
        assert len(sink.batches) == 4
        assert [batch.sequence for batch in sink.batches] == [0, 1, 2, 3]
        assert events_of(sink) == []


async def test_while_the_bus_is_away_events_wait_and_the_oldest_are_dropped_and_counted() -> None:
    """Bounded queue; what is dropped is counted."""
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock, queue_size=10) as out:
        await clock.advance(0.06)
        sink.batches.clear()
        sink.up = False
        for number in range(15):
            out.add(ended(number))
        await clock.advance(0.2)
        sink.up = True
        await clock.advance(0.1)
        assert events_of(sink) == [str(number) for number in range(5, 15)]
        assert sink.batches[-1].dropped == 5


async def test_closing_sends_what_is_left() -> None:
    """A drained router's last decisions are not lost."""
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock) as out:
        await clock.advance(0.06)
        out.add(ended(1))
    assert events_of(sink) == ["1"]


async def test_a_batch_too_large_for_a_message_is_split_and_a_single_one_dropped(monkeypatch) -> None:
    """Otherwise the same batch would be refused for ever and the router's status with it."""
    monkeypatch.setattr("dynamo_poa.reporter.MAX_BATCH_BYTES", 400)
    sink, clock = Sink(), ManualClock()
    async with reporter(sink, clock) as out:
        await clock.advance(0.06)
        sink.batches.clear()
        for number in range(20):
            out.add(ended(number))
        out.add(Ended(request_id="x" * 500, role=Role.DECODE, at_s=0.0, outcome=Outcome.OK))
        out.add(ended(20))
        await clock.advance(0.05)
    assert events_of(sink) == [str(number) for number in range(21)]
    assert len(sink.batches) > 2
    assert out.dropped == 1
