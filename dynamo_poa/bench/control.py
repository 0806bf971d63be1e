"""`python -m dynamo_poa.bench.control`: the control plane's figures, measured on this machine.

Owns: which figures there are, their order and lengths, what is printed and written, the exit status.
Does not own: any measurement: each has a module of its own.
Invariant: a figure is reported whatever its value; the status is 1 only when one could not be measured.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from dynamo_poa.bench import (
    client,
    decide,
    detection,
    growth,
    hop,
    ingest,
    latency,
    memory,
    observe,
    placement,
    relay,
    residency,
    snapshot,
    splits,
    swap,
    tick,
)
from dynamo_poa.bench.report import Figure, Report, table, this_machine
from dynamo_poa.errors import PoaError
from dynamo_poa.telemetry import configure_logging

Say = Callable[[str], None]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    swaps: int = 100
    rounds: int = 5
    ticks: int = 200
    minutes: float = 10.0
    turns: int = 5
    turn_s: float = 8.0
    latency_s: int = 80
    observe_s: float = 60.0
    snapshots: int = 20
    seeds: int = 100
    steady_minutes: float = 30.0
    client_s: float = 15.0
    requests: int = growth.JUDGED
    decisions: int = 60
    splits: int = 40
    placements: int = 12
    resident_blocks: int = 10_000_000


QUICK = Lengths(
    observe_s=20.0,
    swaps=20,
    rounds=3,
    ticks=50,
    minutes=2.0,
    turns=2,
    turn_s=4.0,
    latency_s=55,
    snapshots=5,
    seeds=20,
    steady_minutes=5.0,
    client_s=5.0,
    requests=10_000,
    decisions=20,
    splits=10,
    placements=3,
    resident_blocks=1_000_000,
)

Measurement = Callable[[Lengths, Say], Figure]
FIGURES: dict[str, Measurement] = {
    "ingest": lambda lengths, say: ingest.measure(lengths.rounds, say),
    "tick": lambda lengths, say: tick.measure(lengths.ticks, say),
    "swap": lambda lengths, say: swap.measure(lengths.swaps, say),
    "hop": lambda lengths, say: hop.measure(lengths.turns, lengths.turn_s, say),
    "relay": lambda lengths, say: relay.measure(lengths.turns, lengths.turn_s, say),
    "latency": lambda lengths, say: latency.measure(lengths.latency_s, say),
    "observe": lambda lengths, say: observe.measure(lengths.observe_s, say),
    "memory": lambda lengths, say: memory.measure(lengths.minutes, say),
    "growth": lambda lengths, say: growth.measure(lengths.requests, say),
    "snapshot": lambda lengths, say: snapshot.measure(lengths.snapshots, say),
    "placement": lambda lengths, say: placement.measure(lengths.placements, say),
    "decide": lambda lengths, say: decide.measure(lengths.decisions, say),
    "splits": lambda lengths, say: splits.measure(lengths.splits, say),
    "residency": lambda lengths, say: residency.measure(lengths.resident_blocks, say),
    "client": lambda lengths, say: client.measure(lengths.client_s, say),
    "detection": lambda lengths, say: detection.measure(lengths.steady_minutes, lengths.seeds, say),
}


def measure_all(
    chosen: Mapping[str, Measurement], lengths: Lengths, say: Say
) -> tuple[list[Figure], dict[str, str]]:
    """Measure one figure after another; what cannot be measured does not keep the rest from it."""
    figures, failed = [], {}
    for name, measure in chosen.items():
        say(f"{name} ...")
        try:
            figures.append(measure(lengths, lambda line: say(f"  {line}")))
        except (PoaError, OSError) as error:
            failed[name] = str(error) or type(error).__name__
            say(f"  not measured: {failed[name]}")
    return figures, failed


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dynamo_poa.bench.control", description="The control plane's figures"
    )
    parser.add_argument("--only", default=",".join(FIGURES), help=f"some of {', '.join(FIGURES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--quick", action="store_true", help="shorter runs, for a first look")
    parser.add_argument("--minutes", type=float, help="length of the memory run (10, quick 2)")
    arguments = parser.parse_args(argv)
    arguments.only = [name.strip() for name in arguments.only.split(",")]
    unknown = [name for name in arguments.only if name not in FIGURES]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: must be some of {', '.join(FIGURES)}")
    if arguments.minutes is not None and not 0 < arguments.minutes <= 24 * 60:
        parser.error(f"--minutes {arguments.minutes:g}: must be > 0 and <= 1440")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: its folder must exist")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    arguments = _arguments(argv)
    lengths = QUICK if arguments.quick else Lengths()
    if arguments.minutes is not None:
        lengths = msgspec.structs.replace(lengths, minutes=arguments.minutes)
    configure_logging("warning")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped
    # A file or a pipe has no width of its own.
    console, started_s = Console(width=None if sys.stdout.isatty() else 140), time.perf_counter()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    machine = this_machine()
    say(f"{machine.processor}, {machine.cores} cores, {machine.system}, Python {machine.python}")
    say(", ".join(f"{name} {version}" for name, version in machine.packages.items()))
    say(f"{machine.nats_server}; commit {machine.commit or 'unknown: not a checkout'}")
    figures, failed = measure_all({name: FIGURES[name] for name in arguments.only}, lengths, say)
    console.print(table(tuple(figures), failed))
    for figure in figures:
        say(f"{figure.name}: {figure.title}")
        for condition in figure.conditions:
            say(f"  {condition}")
    report = Report(
        machine=machine, figures=tuple(figures), failed=failed, seconds=time.perf_counter() - started_s
    )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
