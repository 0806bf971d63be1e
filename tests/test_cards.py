"""Announcing the workers' cards: when they go out, that they come back as they were, what is refused."""

from typing import Any

import msgspec
import pytest
from records import RECORD

from dynamo_poa.cards import ANNOUNCE_S, CardsSink
from dynamo_poa.clock import ManualClock
from dynamo_poa.errors import BusError, WireError
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import Cards, decode_cards

W1 = 14370722098883561847  # above 2**63
PREFILL = WorkerCard(
    worker_id=W1,
    role=Role.PREFILL,
    kv_block_size=16,
    total_kv_blocks=4096,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    data_parallel_size=2,
    bootstrap_host="127.0.0.1",
    bootstrap_port=21_000,
    model_name="llama",
)
DECODE = WorkerCard(worker_id=7, role=Role.DECODE, kv_block_size=16)


class Channel:
    """A bus that keeps what is published, and a directory whose cards can be set."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.failing = False
        self.cards: list[WorkerCard] = []

    async def publish(self, subject: str, data: bytes) -> None:
        if self.failing:
            raise BusError("not connected")
        self.sent.append((subject, data))

    def take(self) -> list[tuple[WorkerCard, ...]]:
        """Return what was announced since the last call."""
        announced = [decode_cards(data).cards for _, data in self.sent]
        self.sent.clear()
        return announced


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sink(channel: Channel, clock: ManualClock) -> CardsSink:
    return CardsSink(channel, "poa", lambda: channel.cards, clock)  # type: ignore[arg-type]


async def test_cards_are_announced_at_once_on_every_change_and_again_after_a_while(
    channel: Channel, clock: ManualClock, sink: CardsSink
) -> None:
    """A recorder that comes at any time knows the workers within ANNOUNCE_S."""
    await sink.emit(RECORD)
    assert channel.take() == []
    channel.cards = [PREFILL, DECODE]
    await sink.emit(RECORD)
    assert channel.sent[0][0] == "poa.poa.cards"
    assert channel.take() == [(DECODE, PREFILL)]
    await clock.advance(ANNOUNCE_S - 0.25)
    await sink.emit(RECORD)
    assert channel.take() == []
    await clock.advance(0.25)
    channel.cards = [DECODE, PREFILL]
    await sink.emit(RECORD)
    assert channel.take() == [(DECODE, PREFILL)]
    channel.cards = []
    await sink.emit(RECORD)
    assert channel.take() == [()]


async def test_the_order_discovery_lists_workers_in_is_no_change(channel: Channel, sink: CardsSink) -> None:
    """Discovery's listing has no order of its own."""
    channel.cards = [PREFILL, DECODE]
    await sink.emit(RECORD)
    channel.cards.reverse()
    await sink.emit(RECORD)
    assert channel.take() == [(DECODE, PREFILL)]


async def test_what_could_not_be_sent_is_counted_and_sent_at_the_next_tick(
    channel: Channel, sink: CardsSink
) -> None:
    """Sink: it never raises."""
    channel.cards, channel.failing = [DECODE], True
    await sink.emit(RECORD)
    channel.failing = False
    await sink.emit(RECORD)
    assert (channel.take(), sink.dropped) == ([(DECODE,)], 1)


def message(**change: Any) -> bytes:
    card = msgspec.to_builtins(DECODE) | change.pop("card", {})
    return msgspec.msgpack.encode({"version": 1, "sent_at_s": 0.0, "cards": [card]} | change)


def test_a_field_we_do_not_know_is_ignored() -> None:
    """Another version's recording."""
    assert decode_cards(message(card={"engine": "mocker"}, origin="x")).cards == (DECODE,)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (b"\x91" * 100_000, "cards"),
        (message(cards={}), "cards"),
        (message(card={"role": "encode"}), "cards"),
        (message(card={"kv_block_size": None}), "cards"),
        (message(version=2), "version"),
        (message(card={"worker_id": -1}), "impossible_value"),
        (message(card={"data_parallel_size": 4097}), "impossible_value"),
        (message(card={"data_parallel_size": 0}), "impossible_value"),
        (message(card={"data_parallel_start_rank": -1}), "impossible_value"),
        (message(card={"kv_block_size": 0}), "impossible_value"),
        (message(card={"total_kv_blocks": 0}), "impossible_value"),
        (message(card={"max_num_seqs": -1}), "impossible_value"),
        (message(card={"total_kv_blocks": 2**63}), "impossible_value"),
    ],
)
def test_cards_that_cannot_be_taken_have_a_reason(data: bytes, reason: str) -> None:
    """A recording is a file that anybody may have written; each rank of a card costs state of its own."""
    with pytest.raises(WireError) as caught:
        decode_cards(data)
    assert caught.value.reason == reason


def test_cards_go_through_the_wire_unchanged() -> None:
    """One codec pair; worker ids are unsigned 64-bit."""
    cards = Cards(sent_at_s=1.5, cards=(PREFILL, DECODE))
    assert decode_cards(msgspec.msgpack.encode(cards)) == cards
