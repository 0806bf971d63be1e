"""Playing a recording: when it is looked at, on whose clock, which workers count, what is counted as lost."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo_messages import card, envelope, fp, subject

from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import RecordingError
from dynamo_poa.recording import Header, Writer
from dynamo_poa.serve.playback import Playback
from dynamo_poa.values import Role, WorkerCard, WorkerKey
from dynamo_poa.wire import Cards, Chosen, DecisionBatch, ForwardPass

EPOCH_S = 1_800_000_000.0
HEADER = Header(recording=1, namespace="poa", started_at_s=EPOCH_S, version="0.1.0")
Message = tuple[float, str, bytes]


def passed(at_s: float, worker_id: int, counter: int, wall_time_s: float = 0.02, dp: int = 0) -> Message:
    topic, body = fp(worker_id, counter, wall_time_s, nd=2, dp=dp)
    data = envelope(topic, msgspec.msgpack.encode(body), worker_id, counter - 1, EPOCH_S + at_s)
    return at_s, subject(topic, "poa-workers", "backend"), data


def decided(at_s: float, sequence: int, *worker_ids: int) -> Message:
    events = tuple(
        Chosen(f"{sequence}-{n}", Role.DECODE, EPOCH_S + at_s, EPOCH_S + at_s, w, 0, 32, 1, 1, ())
        for n, w in enumerate(worker_ids)
    )
    batch = DecisionBatch(router_id="r", sequence=sequence, sent_at_s=EPOCH_S + at_s, events=events)
    return at_s, "poa.poa.decisions", msgspec.msgpack.encode(batch)


def announced(at_s: float, *cards: WorkerCard) -> Message:
    return at_s, "poa.poa.cards", msgspec.msgpack.encode(Cards(sent_at_s=EPOCH_S + at_s, cards=cards))


def playback(path: Path, *messages: Message, **options: Any) -> Playback:
    with Writer(path, HEADER) as writer:
        for at_s, where, data in messages:
            writer.write(EPOCH_S + at_s, where, data)
    return Playback(
        path,
        block_size=16,
        make_log=lambda answering: DecisionLog(
            window=16, ttft_window_s=5.0, stale_s=30.0, block_size=16, answering=answering
        ),
        **options,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.ndjson"


def instants(played: Playback) -> list[float]:
    return [instant.at_s for instant in played.instants()]


def test_a_recording_is_looked_at_every_second_from_its_first_message(path: Path) -> None:
    """PoaController.estimate_s, on the recording's own clock; its start counts, whatever the epoch was."""
    played = playback(path, *(passed(17.4 + at_s, 1, n + 1) for n, at_s in enumerate((0.0, 0.9, 1.0, 3.6))))
    assert instants(played) == [0.0, 1.0, 2.0, 3.0]
    assert played.at_s == pytest.approx(3.6)


def test_what_comes_at_an_instant_is_not_in_it(path: Path) -> None:
    """An instant holds what came before it, as a tick would."""
    cards = announced(0.0, card(1, Role.DECODE), card(2, Role.DECODE))
    traffic = [passed(0.1 * n, w, n) for n in range(1, 10) for w in (1, 2)]
    played = playback(
        path, cards, *traffic, decided(0.95, 0, 1), decided(1.0, 1, 2), decided(1.5, 2, 2), passed(2.0, 1, 10)
    )
    sizes = [[snapshot.size for snapshot in instant.snapshots] for instant in played.instants()]
    assert sizes == [[], [1], [3]]


def test_a_silence_is_looked_at_until_all_is_stale_and_then_at_its_end(path: Path) -> None:
    """A clock set forward by a year must not cost a year's looks: stale_s is 30 s."""
    played = playback(path, passed(0.0, 1, 1), passed(31_557_600.5, 1, 2))
    assert instants(played) == [*map(float, range(31)), 31_557_600.0]


def test_a_clock_set_back_is_noted_and_time_goes_on(path: Path) -> None:
    """The epoch's clock may be set while somebody records with another tool."""
    played = playback(path, passed(0.0, 1, 1), passed(2.5, 1, 2), passed(1.0, 1, 3), passed(3.0, 1, 4))
    assert instants(played) == [0.0, 1.0, 2.0, 3.0]
    assert played.inexact["messages earlier than the one before"] == 1


def test_a_recording_shorter_than_a_second_is_looked_at_at_its_end(path: Path) -> None:
    """It then says what is lacking, rather than that there were no decisions."""
    played = playback(path, decided(0.0, 0, 1), announced(0.1, card(1, Role.DECODE)), passed(0.4, 1, 1))
    looks = list(played.instants())
    assert [instant.at_s for instant in looks] == [0.0, pytest.approx(0.4)]
    assert [snapshot.lack for snapshot in looks[-1].snapshots] == ["1 worker, 2 needed"]


def test_cards_announced_later_count_from_the_start_and_change_when_they_change(path: Path) -> None:
    """A recorder hears the cards within ten seconds; a worker that leaves takes its requests with it."""
    one, two = card(1, Role.DECODE), card(2, Role.DECODE)
    traffic = [passed(0.1 * n, w, n) for n in range(1, 10) for w in (1, 2)]
    played = playback(
        path,
        *traffic,
        decided(0.95, 0, 1, 2),
        announced(1.5, one, two),
        announced(2.5, one),
        passed(3.1, 1, 10),
    )
    workers = [
        [(snapshot.workers, snapshot.lack) for snapshot in instant.snapshots] for instant in played.instants()
    ]
    both, left = (WorkerKey(1, 0), WorkerKey(2, 0)), (WorkerKey(1, 0),)
    assert workers == [[], [(both, "")], [(both, "")], [(left, "1 worker, 2 needed")]]
    assert played.inexact == {"decisions without candidates": 2}


def test_forward_passes_and_decisions_are_handed_on(path: Path) -> None:
    """Each once: a repeated envelope, or a pass of an unknown rank, is none."""
    taken: list[tuple[WorkerKey, int, float]] = []
    heard: list[tuple[bytes, float]] = []

    def on_pass(key: WorkerKey, of: WorkerCard, done: ForwardPass, at_s: float) -> None:
        taken.append((key, done.counter_id, at_s))

    def also(data: bytes, at_s: float) -> None:
        heard.append((data, at_s))

    decision = decided(0.5, 0, 1)
    played = playback(
        path,
        announced(0.0, card(1, Role.DECODE)),
        *(passed(0.25, 1, 1), passed(0.25, 1, 1), passed(0.25, 1, 2, dp=3), passed(0.25, 9, 1)),
        decision,
        on_pass=on_pass,
        also=also,
    )
    list(played.instants())
    assert taken == [(WorkerKey(1, 0), 1, 0.25)]
    assert heard == [(decision[2], 0.5)]
    assert played.inexact == {
        "metrics not used: repeated": 1,
        "metrics not used: unknown_rank": 1,
        "metrics not used: unknown_worker": 1,
        "decisions without candidates": 1,
    }


def test_what_cannot_be_read_is_counted_by_what_it_is(path: Path) -> None:
    """Another version, missing fields, bytes that are nothing: named, and what can be read is used."""
    topic, body = fp(1, 5, 0.02, nd=1)

    def altered(change: dict[str, Any], *gone: str) -> Message:
        fields = {name: value for name, value in {**body, **change}.items() if name not in gone}
        data = envelope(topic, msgspec.msgpack.encode(fields), 1, 4, EPOCH_S)
        return 0.5, subject(topic, "poa-workers"), data

    played = playback(
        path,
        passed(0.0, 1, 1),
        altered({"version": 2}),
        altered({}, "scheduled_requests"),
        altered({"wall_time": 1e9}),
        (0.5, subject(topic, "poa-workers"), b"\xc1"),
        (0.5, "poa.poa.decisions", msgspec.msgpack.encode({"version": 9, "router_id": "r"})),
        (0.5, "poa.poa.decisions", b"\xc1"),
        (0.5, "poa.poa.cards", msgspec.msgpack.encode({"version": 2, "sent_at_s": 0, "cards": []})),
        (0.5, "elsewhere", b""),
        decided(0.5, 0, 1),
    )
    list(played.instants())
    assert played.inexact == {
        "workers inferred from forward passes, no cards recorded": 1,
        "metrics not used: version": 1,
        "metrics not used: payload": 1,
        "metrics not used: impossible_value": 1,
        "metrics not used: not_msgpack": 1,
        "decisions refused: schema": 1,
        "decisions refused: not_msgpack": 1,
        "cards refused: version": 1,
        "decisions without candidates": 1,
    }
    assert played.unknown == {"'elsewhere'": 1}
    assert played.messages == {topic: 5, "decisions": 3, "cards": 1}


def test_without_decisions_and_forward_passes_there_is_nothing_to_estimate_from(path: Path) -> None:
    """kv_metrics alone tell neither speed nor placement; the error says what there was."""
    metrics = (0.0, subject("kv_metrics", "poa-workers"), b"\xc1")
    with pytest.raises(RecordingError) as caught:
        instants(playback(path, metrics))
    assert str(caught.value) == (
        f"{path}: holds nothing to estimate from: kv_metrics 1, metrics not used: not_msgpack 1"
    )
