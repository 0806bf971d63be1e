"""How many of Dynamo's messages a second one core decodes and applies, without NATS.

Owns: the measurement over recorded real traffic.
Does not own: the cost of the NATS client, which comes on top.
Source: `python -m dynamo_poa.bench.fleet_decode [folder]`, of recordings; by default tests/fixtures
        of the checkout.
"""

import base64
import gzip
import json
import statistics
import sys
import time
from pathlib import Path

from dynamo_poa.fleet import Fleet
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import decode_dynamo

RUNS = 5
PASSES = 20
# Namespaces as recorded. Worker ids come from the messages, so that recordings without cards serve too.
RECORDINGS = {"disagg_2p3d": "workers", "agg_4w_smallcache": "dynamo", "nats_outage_20s": "dynamo"}

Messages = list[tuple[str, bytes, float]]


def load(path: Path) -> Messages:
    """Read a recording: subject, bytes and instant of receipt of each message."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["subject"], base64.b64decode(row["data"]), row["t"]) for row in rows]


def cards(messages: Messages) -> list[WorkerCard]:
    """Make a card for every worker that speaks."""
    found = set()
    for subject, data, _ in messages:
        body = decode_dynamo(subject, data).body
        for part in body if isinstance(body, tuple) else (body,):
            if part is not None:
                found.add(part.worker_id)
    return [
        WorkerCard(worker_id=worker_id, role=Role.AGGREGATED, kv_block_size=16, total_kv_blocks=4096)
        for worker_id in found
    ]


def measure(namespace: str, messages: Messages) -> float:
    """Return messages a second of decoding and applying, over PASSES fresh fleets."""
    known = cards(messages)
    spent_s = 0.0
    for _ in range(PASSES):
        fleet = Fleet(namespace, stale_s=30.0)
        fleet.set_cards(known, messages[0][2])
        started_s = time.perf_counter()
        for subject, data, at_s in messages:
            fleet.observe(subject, data, at_s, at_s)
        spent_s += time.perf_counter() - started_s
    return PASSES * len(messages) / spent_s


def main() -> None:
    """Print one line a recording."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "tests" / "fixtures"
    for name, namespace in RECORDINGS.items():
        messages = load(folder / f"{name}.ndjson.gz")
        rates = [measure(namespace, messages) for _ in range(RUNS)]
        median = statistics.median(rates)
        print(
            f"{name}: {median:,.0f} messages/s, {1e6 / median:.2f} µs each "
            f"(median of {RUNS}, range {min(rates):,.0f} to {max(rates):,.0f}; {len(messages)} messages)"
        )


if __name__ == "__main__":
    main()
