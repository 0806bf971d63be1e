"""Messages as Dynamo 1.4.2 sends them: encoders in the shorthand of the acceptance cases, and recordings."""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_poa.fleet import Fleet
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import card_from_mdc

FIXTURES = Path(__file__).parent / "fixtures"

# W1 to W3 exceed 2^63; W2 and W3 are the same number as a double.
W1 = 11754729614433491301
W2 = 14370722098883561847
W3 = 14370722098883561846
W4 = 3767415147311486784

Body = Any


class Recorded(NamedTuple):
    """One received message."""

    at_s: float
    subject: str
    data: bytes


def subject(topic: str, namespace: str = "ns", component: str = "backend") -> str:
    return f"namespace.{namespace}.component.{component}.endpoint.generate.{topic}"


def envelope(topic: str, payload: bytes, publisher_id: int, sequence: int, published_at_s: float) -> bytes:
    return msgspec.msgpack.encode(
        {
            "publisher_id": publisher_id,
            "sequence": sequence,
            "published_at": round(published_at_s * 1000),
            "topic": topic,
            "payload": payload,
        }
    )


def km(w: int, adb: int | None, apt: int | None, kub: int | None, dp: int = 0) -> tuple[str, Body]:
    """KM of the acceptance cases."""
    return "kv_metrics", {
        "worker_id": w,
        "dp_rank": dp,
        "active_decode_blocks": adb,
        "active_prefill_tokens": apt,
        "kv_used_blocks": kub,
    }


def fp(
    w: int, c: int, wt: float, np: int = 0, pt: int = 0, nd: int = 0, qn: int = 0, qt: int = 0, dp: int = 0
) -> tuple[str, Body]:
    """FP of the acceptance cases."""
    return "forward-pass-metrics", {
        "version": 1,
        "worker_id": str(w),
        "dp_rank": dp,
        "counter_id": c,
        "wall_time": wt,
        "scheduled_requests": {
            "num_prefill_requests": np,
            "sum_prefill_tokens": pt,
            "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": 0,
            "num_decode_requests": nd,
            "sum_decode_kv_tokens": 0,
            "var_decode_kv_tokens": 0.0,
        },
        "queued_requests": {
            "num_prefill_requests": qn,
            "sum_prefill_tokens": qt,
            "var_prefill_length": 0.0,
            "num_decode_requests": 0,
            "sum_decode_kv_tokens": 0,
            "var_decode_kv_tokens": 0.0,
        },
    }


def _event(w: int, event_id: int, data: Body, dp: int, tier: str) -> tuple[str, Body]:
    event = {"event_id": event_id, "data": data, "dp_rank": dp}
    return "kv-events", [{"worker_id": w, "storage_tier": tier, "event": event}]


def st(
    w: int, event_id: int, parent: int | None, hashes: Sequence[int], dp: int = 0, tier: str = "device"
) -> tuple[str, Body]:
    """ST of the acceptance cases."""
    blocks = [{"block_hash": h, "tokens_hash": h, "mm_extra_info": None} for h in hashes]
    stored = {"parent_hash": parent, "start_position": None, "blocks": blocks}
    return _event(w, event_id, {"stored": stored}, dp, tier)


def rm(w: int, event_id: int, hashes: Sequence[int], dp: int = 0, tier: str = "device") -> tuple[str, Body]:
    """RM of the acceptance cases."""
    return _event(w, event_id, {"removed": {"block_hashes": list(hashes)}}, dp, tier)


def cl(w: int, event_id: int, dp: int = 0) -> tuple[str, Body]:
    """CL of the acceptance cases."""
    return _event(w, event_id, "cleared", dp, "device")


class Sender:
    """Publishers that number their envelopes, feeding a fleet directly.

    A publisher is named by a string; each (name, topic) counts its own sequence, as in Dynamo.
    """

    def __init__(self, fleet: Fleet, namespace: str = "ns", epoch_s: float = 1_800_000_000.0) -> None:
        self.fleet = fleet
        self.namespace = namespace
        self.epoch_s = epoch_s  # wall clock at instant 0 of the monotonic one
        self._sequences: dict[tuple[str, str], int] = {}
        self._ids: dict[tuple[str, str], int] = {}

    def publisher_id(self, publisher: str, topic: str) -> int:
        return self._ids.setdefault((publisher, topic), 1000 + len(self._ids))

    def encode(
        self,
        publisher: str,
        message: tuple[str, Body],
        at_s: float,
        skew_s: float = 0.0,
        sequence: int | None = None,
    ) -> tuple[str, bytes]:
        topic, body = message
        key = (publisher, topic)
        if sequence is None:
            sequence = self._sequences.get(key, 0)
            self._sequences[key] = sequence + 1
        data = envelope(
            topic,
            msgspec.msgpack.encode(body),
            self.publisher_id(publisher, topic),
            sequence,
            self.epoch_s + at_s + skew_s,
        )
        return subject(topic, self.namespace), data

    def send(
        self,
        publisher: str,
        message: tuple[str, Body],
        at_s: float,
        skew_s: float = 0.0,
        sequence: int | None = None,
    ) -> bytes:
        """Deliver a message at once and return its bytes."""
        where, data = self.encode(publisher, message, at_s, skew_s, sequence)
        self.fleet.observe(where, data, at_s, self.epoch_s + at_s)
        return data


def card(
    worker_id: int, role: Role = Role.AGGREGATED, total_kv_blocks: int | None = 4096, ranks: int = 1
) -> WorkerCard:
    return WorkerCard(
        worker_id=worker_id,
        role=role,
        kv_block_size=16,
        total_kv_blocks=total_kv_blocks,
        data_parallel_size=ranks,
    )


def recording(name: str) -> list[Recorded]:
    """Return a recording's messages, oldest first."""
    with gzip.open(FIXTURES / f"{name}.ndjson.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Recorded(row["t"], row["subject"], base64.b64decode(row["data"])) for row in rows]


def recorded_cards(name: str, namespace: str) -> list[WorkerCard]:
    """Return the cards discovery listed in a namespace while a recording was made."""
    meta = json.loads((FIXTURES / f"{name}.meta.json").read_text())
    return [
        card_from_mdc(entry["instance_id"], entry["card"])
        for entry in meta["cards"]
        if entry["namespace"] == namespace
    ]


def bodies(messages: Sequence[Recorded], topic: str) -> Iterator[tuple[dict[str, Any], Body]]:
    """Yield (envelope, body) of one topic, decoded without the package, as plain Python values."""
    for message in messages:
        if message.subject.endswith(f".{topic}"):
            outer = msgspec.msgpack.decode(message.data)
            yield outer, msgspec.msgpack.decode(outer["payload"])
