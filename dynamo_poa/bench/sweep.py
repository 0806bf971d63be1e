"""`python -m dynamo_poa.bench.sweep`: PoA-hat against concurrency, live, of equal workers and with one slow.

Owns: the two fleets, the load and its levels, what is printed and written, the exit status.
Does not own: serving (serve/), the load client (load.py), what a level holds and looks like (levels.py).
Invariant: a level's estimate is of its measured seconds alone: the controller's window is as long.
Source: measured on two cores: at these speeds the machine is half busy with 256 users, so the simulated GPUs
        are the limit.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop
from rich.console import Console

from dynamo_poa.bench.levels import Level, SweepReport, estimate_of, is_void, line, stragglers_of, tables
from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.processes import busy_frac, cpu_s, machine_time
from dynamo_poa.bench.report import MeasurementError, this_machine
from dynamo_poa.bench.story import CPU_BUSY_FRAC, quantile
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import PoaError
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.telemetry import TelemetryRecord, configure_logging
from dynamo_poa.wire import subject

PROMPT_TOKENS = 512
OUT_TOKENS = 64
CONCURRENCIES = (8, 16, 32, 64, 128, 256)
QUICK_CONCURRENCIES = (8, 64, 256)
MEASURED_S = 20.0
LEAST_WARM_UP_S = 5.0
MOST_WARM_UP_S = 60.0
REQUEST_TIMEOUT_S = 300.0  # 256 users' on the slow worker take 30 s
PREFILL_SPEED = 0.5
DECODE_SPEED = 0.25
SLOWDOWN = 5
KV_BLOCKS = 4096  # never full: 256 users take 0.4 of it
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=2",
    "PrefillWorker.per_process=2",
    f"PrefillWorker.args={{speedup-ratio: {PREFILL_SPEED}, num-gpu-blocks-override: {KV_BLOCKS}}}",
    "DecodeWorker.workers=4",
    "DecodeWorker.per_process=4",
    f"DecodeWorker.args={{speedup-ratio: {DECODE_SPEED}, num-gpu-blocks-override: {KV_BLOCKS}}}",
    "PoaRouter.min_prefill_workers=2",
    "PoaRouter.min_decode_workers=4",
    "PoaController.mode=shadow",
    "PoaController.estimate_s=0.5",
    f"PoaController.estimate_window_s={MEASURED_S:g}",
)


class Fleet(NamedTuple):
    """2 prefill and 4 decode workers, and how they differ from the equal ones."""

    name: str
    overrides: tuple[str, ...] = ()


FLEETS = (
    Fleet("equal"),
    Fleet("one slow", (f"DecodeWorker.args_of.3.speedup-ratio={DECODE_SPEED / SLOWDOWN:g}",)),
)


async def measure(fleet: Fleet, concurrencies: Sequence[int], tell: Callable[[Level], None]) -> None:
    """Serve a fleet and take it through the levels, one after the other without a pause.

    Args:     tell: gets each level when it ends.
    Raises:  MeasurementError when requests or telemetry do not come.
    """
    clock = SystemClock()
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", (*OVERRIDES, *fleet.overrides))
    async with (
        serve_graph(plan, clock=clock) as running,
        Bus(running.nats_url, name="sweep", clock=clock) as bus,
    ):
        run = _Run(fleet.name, running, clock)
        bus.subscribe(subject(plan.namespace, "telemetry"), run.take_telemetry)
        await bus.wait_connected(10.0)
        for concurrency in concurrencies:
            tell(await run.level(concurrency))
        await run.users.finish()


class _Run:
    """One fleet under load."""

    def __init__(self, name: str, running: Running, clock: Clock) -> None:
        common = running.plan.sections["Common"]
        assert isinstance(common, CommonConfig)
        self._name, self._running, self._clock = name, running, clock
        self._results: list[Result] = []
        self._latest: TelemetryRecord | None = None
        self._decode = msgspec.msgpack.Decoder(TelemetryRecord).decode
        port = urlsplit(running.http_url).port or 80
        client = LoadClient("127.0.0.1", port, common.model_name, clock=clock, timeout_s=REQUEST_TIMEOUT_S)
        source = prompts(
            prompt_tokens=PROMPT_TOKENS, max_tokens=OUT_TOKENS, templates=5, shared_frac=0.25, seed=1
        )
        self.users = ClosedLoop(client, source, self._results.append, clock)

    def take_telemetry(self, _: str, data: bytes) -> None:
        """Keep the controller's latest record."""
        self._latest = self._decode(data)

    async def level(self, concurrency: int) -> Level:
        """Bring so many users on, wait until it has settled, measure."""
        clock, results = self._clock, self._results
        self.users.resize(concurrency)
        warm_up_s = await self._warm_up(concurrency)
        results.clear()
        machine_before, own_before_s, started_s = machine_time(), self._own_cpu_s(), clock.monotonic_s()
        await clock.sleep(MEASURED_S)
        elapsed_s, machine_after = clock.monotonic_s() - started_s, machine_time()
        own_s, busy = self._own_cpu_s() - own_before_s, busy_frac(machine_before, machine_after)
        record, good = self._latest, [result for result in results if result.ok]
        ttfts_s = [result.ttft_s for result in good if result.ttft_s is not None]
        if record is None or not good:
            errors = sorted({result.error for result in results if not result.ok})
            heard = "telemetry came" if record else "no telemetry came"
            raise MeasurementError(
                f"{self._name}, {concurrency} users: no request succeeded {errors[:3]}, {heard}"
            )
        return Level(
            fleet=self._name,
            concurrency=concurrency,
            warm_up_s=warm_up_s,
            seconds=elapsed_s,
            requests=len(good),
            failed=len(results) - len(good),
            throughput_rps=len(good) / elapsed_s,
            ttft_p50_s=quantile(ttfts_s, 0.5) if ttfts_s else None,
            ttft_p99_s=quantile(ttfts_s, 0.99) if ttfts_s else None,
            estimate=estimate_of(record),
            regime=record.regime,
            stragglers=stragglers_of(record),
            cpu_busy_frac=busy,
            cpu_own_frac=own_s / (machine_after.total_s - machine_before.total_s),
            void=is_void(busy),
        )

    def _own_cpu_s(self) -> float:
        """Return the processor time of the graph and of this process so far."""
        pids = [self._running.process(process.name).pid for process in self._running.plan.processes]
        return time.process_time() + sum(cpu_s(pid) for pid in pids if pid is not None)

    async def _warm_up(self, concurrency: int) -> float:
        """Wait until as many requests have ended as there are users: the queue of their arrival is gone."""
        self._results.clear()
        started_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(0.1)
            elapsed_s = self._clock.monotonic_s() - started_s
            settled = elapsed_s >= LEAST_WARM_UP_S and len(self._results) >= concurrency
            if settled or elapsed_s >= MOST_WARM_UP_S:
                return elapsed_s


def conditions() -> tuple[str, ...]:
    """Return what a reader must know of how the figures came about."""
    return (
        f"closed loop; {PROMPT_TOKENS} tokens in, a quarter of them a shared prefix, {OUT_TOKENS} out",
        f"a level: until as many requests have ended as there are users, then {MEASURED_S:g} s measured; its "
        "estimate is the controller's at their end, over a window of that length",
        "Dynamo's own routing at τ = 0 and ω = 1: the controller watches and does not apply (shadow)",
        f"mock engine: prefill at {PREFILL_SPEED:g}, decode at {DECODE_SPEED:g} of its GPU's speed, "
        f"{KV_BLOCKS} KV blocks a worker; `one slow`: one of the decode workers is {SLOWDOWN}x slower",
        f"a level is void when the machine's processors were busy for more than {CPU_BUSY_FRAC:.0%}",
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    few = ", ".join(map(str, QUICK_CONCURRENCIES))
    parser = argparse.ArgumentParser(
        prog="dynamo_poa.bench.sweep", description="PoA-hat against concurrency, live"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--quick", action="store_true", help=f"only {few} users, for a first look")
    arguments = parser.parse_args(argv)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: its folder must exist")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status: 1 when a level is void or could not be measured."""
    arguments = _arguments(argv)
    configure_logging("warning")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that graphs are stopped
    # A file or a pipe has no width of its own.
    console, started_s = Console(width=None if sys.stdout.isatty() else 180), time.perf_counter()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    def tell(level: Level) -> None:
        levels.append(level)
        say(f"{level.fleet}, {level.concurrency} users: {line(level)}")

    levels, failed = list[Level](), dict[str, str]()
    for fleet in FLEETS:
        say(f"{fleet.name}: starting the graph")
        try:
            uvloop.run(measure(fleet, QUICK_CONCURRENCIES if arguments.quick else CONCURRENCIES, tell))
        except (PoaError, OSError) as error:
            failed[fleet.name] = str(error) or type(error).__name__
            say(f"not measured: {failed[fleet.name]}")
    for table in tables(levels):
        console.print(table)
    for condition in conditions():
        say(condition)
    void = any(level.void for level in levels)
    if void:
        say("Levels marked VOID say nothing of the workers: the processors were the limit.")
    report = SweepReport(
        machine=this_machine(),
        conditions=conditions(),
        levels=tuple(levels),
        void=void,
        failed=failed,
        seconds=time.perf_counter() - started_s,
    )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 1 if failed or void else 0


if __name__ == "__main__":
    sys.exit(main())
