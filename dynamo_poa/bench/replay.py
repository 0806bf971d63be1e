"""Recorded event-plane traffic, continued for as long as wanted.

Owns: repeating recordings with their numbering carried on, and sending messages over a raw socket.
Does not own: what consumers make of it (ingest.py).
Invariant: a repetition is never a duplicate: sequences, pass counters and event ids go on where they ended,
           so everything is decoded and applied as it was the first time.
Source: recordings of Dynamo 1.4.2 in tests/fixtures of the checkout.
"""

import socket
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from dynamo_poa.wire import FORWARD_PASS_METRICS, KV_EVENTS

SEND_BYTES = 64 * 1024


class Message(NamedTuple):
    """One message as it goes over the wire."""

    subject: str
    data: bytes


class Replay:
    """A recording without end.

    Args:  recorded: subject and bytes, in order.  namespace: of workers, in place of the recorded one.
    """

    def __init__(self, recorded: Iterable[tuple[str, bytes]], namespace: str) -> None:
        self._rows: list[tuple[str, dict[str, Any], Any]] = []
        for recorded_subject, data in recorded:
            tokens = recorded_subject.split(".")
            envelope = msgspec.msgpack.decode(data)
            payload = msgspec.msgpack.decode(envelope["payload"])
            self._rows.append((".".join([tokens[0], namespace, *tokens[2:]]), envelope, payload))
        self._sequence_span = _spans(
            ((row["publisher_id"], row["topic"]), row["sequence"]) for _, row, _ in self._rows
        )
        self._counter_span = _spans(
            ((payload["worker_id"], payload["dp_rank"]), payload["counter_id"])
            for _, row, payload in self._rows
            if row["topic"] == FORWARD_PASS_METRICS
        )
        self._event_span = _spans(
            ((event["worker_id"], event["event"]["dp_rank"]), event["event"]["event_id"])
            for _, row, payload in self._rows
            if row["topic"] == KV_EVENTS
            for event in payload
        )
        self._passes = 0

    def next_pass(self, wall_s: float) -> list[Message]:
        """Return the whole recording once more, published now."""
        number, self._passes = self._passes, self._passes + 1
        return [
            Message(to, self._renumbered(envelope, payload, number, wall_s))
            for to, envelope, payload in self._rows
        ]

    def _renumbered(self, envelope: dict[str, Any], payload: Any, number: int, wall_s: float) -> bytes:
        topic = envelope["topic"]
        if topic == FORWARD_PASS_METRICS:
            span = self._counter_span[payload["worker_id"], payload["dp_rank"]]
            payload = {**payload, "counter_id": payload["counter_id"] + number * span}
        elif topic == KV_EVENTS:
            payload = [self._renumbered_event(event, number) for event in payload]
        span = self._sequence_span[envelope["publisher_id"], topic]
        return msgspec.msgpack.encode(
            {
                **envelope,
                "sequence": envelope["sequence"] + number * span,
                "published_at": int(wall_s * 1000),
                "payload": msgspec.msgpack.encode(payload),
            }
        )

    def _renumbered_event(self, event: dict[str, Any], number: int) -> dict[str, Any]:
        inner = event["event"]
        event_id = inner["event_id"] + number * self._event_span[event["worker_id"], inner["dp_rank"]]
        return {**event, "event": {**inner, "event_id": event_id}}


def _spans(numbers: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Return how many numbers each counter went through: what its next pass starts beyond."""
    low: dict[Any, int] = {}
    high: dict[Any, int] = {}
    for of, number in numbers:
        low[of] = min(number, low.get(of, number))
        high[of] = max(number, high.get(of, number))
    return {of: high[of] - low[of] + 1 for of in low}


class RawPublisher:
    """A NATS connection that only publishes: no parsing, so that the sender is not what limits."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._socket = socket.create_connection((target.hostname, target.port))
        self._socket.sendall(b'CONNECT {"verbose":false}\r\n')

    def send(self, messages: bytes) -> None:
        """Send what `pub_lines` made."""
        self._socket.sendall(messages)

    def flush(self) -> None:
        """Return once the server has taken everything."""
        self._socket.sendall(b"PING\r\n")
        answer = b""
        while b"PONG" not in answer:
            received = self._socket.recv(65_536)
            if not received:
                raise ConnectionError("the NATS server closed the connection")
            answer = answer[-8:] + received

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def pub_lines(messages: Iterable[Message]) -> bytes:
    """Return messages as the NATS protocol's PUB lines."""
    return b"".join(b"PUB %s %d\r\n%s\r\n" % (to.encode(), len(data), data) for to, data in messages)
