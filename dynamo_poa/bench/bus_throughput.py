"""How many messages a second one core takes from a real NATS server into a handler.

Owns: a raw-socket publisher in a process of its own, and the measurement.
Does not own: what a real handler costs (the fleet view adds its decoding).
Invariant: the publisher is not the bottleneck: it sends ready-made batches of PUB lines without parsing.
Source: goal of 50,000 messages a second of about 600 bytes into the fleet view.

Run: `python -m dynamo_poa.bench.bus_throughput [nats://host:port]`; without a URL it starts a server.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock

SUBJECT = "bench.flood"
BATCH = 100


def flood(url: str, messages: int, size_bytes: int) -> None:
    """Publish `messages` of `size_bytes` over a raw socket; returns when the server has taken all."""
    target = urlsplit(url)
    line = f"PUB {SUBJECT} {size_bytes}\r\n".encode() + b"x" * size_bytes + b"\r\n"
    with socket.create_connection((target.hostname, target.port)) as connection:
        connection.sendall(b'CONNECT {"verbose":false}\r\n')
        for _ in range(messages // BATCH):
            connection.sendall(line * BATCH)
        connection.sendall(b"PING\r\n")
        answer = b""
        while b"PONG" not in answer:
            answer = answer[-8:] + connection.recv(65536)


async def measure(url: str, messages: int, size_bytes: int, rounds: int) -> list[float]:
    """Return messages a second of each round, by CPU time of this process and its only thread."""
    received = 0
    rates = []

    def handler(_subject: str, _data: bytes) -> None:
        nonlocal received
        received += 1

    clock = SystemClock()
    async with Bus(url, name="bench", clock=clock) as bus:
        bus.subscribe(SUBJECT, handler, pending_messages=2 * messages, pending_bytes=2**30)
        await bus.wait_connected(5)
        for _ in range(rounds):
            received = 0
            publisher = multiprocessing.get_context("spawn").Process(
                target=flood, args=(url, messages, size_bytes)
            )
            publisher.start()
            while received < BATCH:
                await clock.sleep(0.001)
            before, cpu_s, wall_s = received, time.process_time(), time.perf_counter()
            while received < messages:
                await clock.sleep(0.005)
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            publisher.join()
            rates.append((received - before) / cpu_s)
            print(
                f"{received} messages of {size_bytes} B: {rates[-1]:,.0f}/s of CPU, "
                f"{(received - before) / wall_s:,.0f}/s of wall time, dropped {bus.dropped}"
            )
    return rates


def main() -> None:
    """Measure and print the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="an existing server")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=600, help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    args = parser.parse_args()
    run = uvloop.run if args.loop == "uvloop" else asyncio.run
    with contextlib.nullcontext(args.url) if args.url else own_server() as url:
        rates = run(measure(url, args.messages, args.size, args.rounds))
    print(f"median of {len(rates)}: {statistics.median(rates):,.0f} messages a second of CPU ({args.loop})")


@contextlib.contextmanager
def own_server(jetstream: bool = False) -> Iterator[str]:
    """Yield the URL of a server on a free port."""
    with tempfile.TemporaryDirectory() as folder:
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
        store = ("-js", "-sd", f"{folder}/store") if jetstream else ()
        server = subprocess.Popen(
            [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder, *store],
            stderr=subprocess.DEVNULL,
        )
        try:
            ports = Path(folder) / f"{Path(binary).name}_{server.pid}.ports"
            while not (ports.exists() and ports.stat().st_size):
                time.sleep(0.02)
            yield json.loads(ports.read_text())["nats"][0]
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
