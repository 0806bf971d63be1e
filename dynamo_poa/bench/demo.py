"""`dynamo-poa demo`: one command that shows a slow worker found and relieved while load crosses the knee.

Owns: the demo's graph, its load ramp, when an operator holds the policy back, what is printed, the exit
      status.
Does not own: serving (serve/), load (load.py), figures (story.py).
Invariant: everything runs on loopback with embedded parts and is gone when the command ends. Nobody is told
           which worker is slow.
Source: measured on two cores: with these settings 2 prefill workers saturate near 25 concurrent requests
        while the processors are a third busy.
"""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dynamo_poa.bench.load import ClosedLoop, LoadClient, prompts
from dynamo_poa.bench.processes import busy_frac, machine_time
from dynamo_poa.bench.story import DemoReport, Story
from dynamo_poa.bench.swap import watch_swaps
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.serve.target import ask
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.wire import subject

SPEEDUP = 0.5  # of the mock engine; slow enough that its simulated GPU is the bottleneck
SLOWER = 5.0  # times, is one decode worker
POLICY = "marginal"
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=2",
    "PrefillWorker.per_process=2",
    f"PrefillWorker.args={{speedup-ratio: {SPEEDUP}, max-num-batched-tokens: 512}}",
    "DecodeWorker.workers=4",
    "DecodeWorker.per_process=4",
    f"DecodeWorker.args={{speedup-ratio: {SPEEDUP}}}",
    f"DecodeWorker.args_of={{0: {{speedup-ratio: {SPEEDUP / SLOWER}}}}}",
    "PoaRouter.min_prefill_workers=2",
    "PoaRouter.min_decode_workers=4",
    f"PoaController.policy.name={POLICY}",
)
HELD = {
    "op": "set",
    "router_temperature": 0.0,
    "overlap_weight": 1.0,
}  # Dynamo's defaults, Dynamo's selection
RELEASED = {"op": "release"}


class Phase(NamedTuple):
    """A stretch of constant load.

    held:  an operator's pin keeps Dynamo's own selection, whatever the policy would do
    """

    name: str
    concurrency: int
    seconds: float
    held: bool = False


PHASES = (
    Phase("calm, held", 6, 14, held=True),
    Phase("busy, held", 18, 16, held=True),
    Phase("busy", 18, 16),
    Phase("peak", 72, 20),
    Phase("falling", 8, 14),
    Phase("calm again", 6, 14),
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(demo)


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result there")] = None,
    verbose: Annotated[bool, typer.Option(help="show the output of every process")] = False,
) -> None:
    """Show a slow worker found and relieved, and the regime change: mock workers, a load ramp and back."""
    report = run(json_file, verbose)
    shown = report.went_up_and_down and report.relieved
    raise typer.Exit(0 if shown and not report.failed_requests else 1)


def run(json_file: Path | None = None, verbose: bool = False, phases: Sequence[Phase] = PHASES) -> DemoReport:
    """Do all of the demo but judge it.

    Raises:  ConfigError when the result could not be written.
    """
    from dynamo_poa.serve.prepare import make_plan

    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError([f"--json = {str(json_file)!r}: its folder must exist"])
    console = Console(width=None if sys.stdout.isatty() else 120)
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", OVERRIDES)
    report = asyncio.run(_run(plan, console, verbose, phases))
    console.print(table(report))
    console.print(_summary(report), highlight=False)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return report


async def _run(plan: Plan, console: Console, verbose: bool, phases: Sequence[Phase]) -> DemoReport:
    clock = SystemClock()
    started_at_s = clock.monotonic_s()
    recent: deque[str] = deque(maxlen=40)

    def emit(name: str, line: str) -> None:
        recent.append(f"{name} | {line}")
        if verbose:
            console.print(f"{name:10} | {line}", markup=False, highlight=False)

    console.print(
        f"starting NATS, 2 prefill and 4 decode mock workers, one of these {SLOWER:g}x slower, router, "
        "controller, frontend ..."
    )
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    async with (
        serve_graph(plan, emit, clock) as running,
        Bus(running.nats_url, name="demo", clock=clock) as bus,
    ):
        url = urlsplit(running.http_url)
        client = LoadClient(url.hostname or "127.0.0.1", url.port or 80, common.model_name, clock=clock)
        story = Story()
        begun_at_s = clock.monotonic_s()

        def tell(line: str) -> None:
            console.print(f"[bold]{clock.monotonic_s() - begun_at_s:6.1f} s  {line}[/bold]", highlight=False)

        _listen(bus, plan.namespace, story, tell)
        await bus.wait_connected(10.0)
        console.print(f"ready: {running.http_url}/v1/chat/completions")

        async def hold(held: bool) -> None:
            await ask(bus, plan.namespace, HELD if held else RELEASED)
            told = "an operator holds Dynamo's selection" if held else f"released: policy {POLICY} may act"
            console.print(f"         {told}", highlight=False)

        busiest = await _ramp(client, story, clock, console, phases, hold)
        return story.report(cpu_busy_frac=busiest, seconds=clock.monotonic_s() - started_at_s)


def _listen(bus: Bus, namespace: str, story: Story, tell: Callable[[str], None]) -> None:
    records = msgspec.msgpack.Decoder(TelemetryRecord)

    def on_telemetry(_: str, data: bytes) -> None:
        for line in story.on_telemetry(records.decode(data)):
            tell(line)

    bus.subscribe(subject(namespace, "telemetry"), on_telemetry)
    watch_swaps(bus, namespace, story)


async def _ramp(
    client: LoadClient,
    story: Story,
    clock: Clock,
    console: Console,
    phases: Sequence[Phase],
    hold: Callable[[bool], Awaitable[None]],
) -> float:
    """Drive all phases; return the share of the busiest phase in which the processors were busy."""
    source = prompts(prompt_tokens=1024, max_tokens=32, templates=5, shared_frac=0.25, seed=1)
    loop = ClosedLoop(client, source, story.on_result, clock)
    busiest, held = 0.0, False
    for phase in phases:
        if phase.held != held:
            await hold(held := phase.held)
        story.begin(phase.name, phase.concurrency, clock.monotonic_s())
        console.print(
            f"         {phase.name}: {phase.concurrency} users for {phase.seconds:g} s", highlight=False
        )
        loop.resize(phase.concurrency)
        before = machine_time()
        with _progress(console) as show:
            until_s = clock.monotonic_s() + phase.seconds
            while (left_s := until_s - clock.monotonic_s()) > 0:
                show(_line(phase, left_s, story))
                await clock.sleep(min(left_s, 0.5))
        busiest = max(busiest, busy_frac(before, machine_time()))
        if phase is phases[-1]:
            await loop.finish()
        done = story.end(clock.monotonic_s())
        console.print(
            f"         {phase.name} is over: {done.requests} requests, TTFT P99 {_ms(done.ttft_p99_s)}, "
            f"end to end {_ms(done.e2e_p99_s)}",
            highlight=False,
        )
    return busiest


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Show one line that changes in place; nothing where the output is not a terminal."""
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("") as status:
        yield lambda line: status.update(line)


def _line(phase: Phase, left_s: float, story: Story) -> str:
    record = story.latest
    if record is None:
        return f"{phase.name}: {phase.concurrency} users, {left_s:.0f} s left"
    return (
        f"{phase.name}: {phase.concurrency} users, {left_s:.0f} s left | {record.regime} | "
        f"TTFT P99 {_ms(record.ttft_p99_s)} | PoA-hat {_number(record.poa_hat)} | "
        f"{record.selection} | τ {record.router_temperature:g} ω {record.overlap_weight:g}"
    )


def table(report: DemoReport) -> Table:
    """Return the closing table: one row per phase."""
    result = Table(
        title="Phase by phase; regime and who selects, at its end",
        caption="slow: the slow worker's share of the decode picks; PoA-hat what the routing cost over the "
        "best possible; TTFT and E2E as the clients saw them; kv is Dynamo's selection",
    )
    for name in ("phase", "users", "requests", "failed", "TTFT P99", "E2E P99", "per s", "PoA-hat"):
        result.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for name in ("slow", "regime", "selects"):
        result.add_column(name, justify="right" if name == "slow" else "left", no_wrap=True)
    for phase in report.phases:
        result.add_row(
            phase.name,
            str(phase.concurrency),
            str(phase.requests),
            str(phase.failed),
            _ms(phase.ttft_p99_s),
            _ms(phase.e2e_p99_s),
            "-" if phase.throughput_rps is None else f"{phase.throughput_rps:.1f}",
            "-" if phase.poa_hat is None else f"{phase.poa_hat:.2f}",
            _percent(phase.slow_share),
            phase.regime or "-",
            phase.selection or "-",
        )
    return result


def _summary(report: DemoReport) -> str:
    latency = report.swap_latency_s
    lines = [
        _slow_summary(report),
        f"{len(report.transitions)} regime changes, {report.swaps} swaps; from the decision to the first "
        f"request routed with it: median {_ms(latency.median)}, worst {_ms(latency.max)}",
        f"{report.failed_requests} failed requests"
        + "".join(f"; {count} x {error}" for error, count in report.failures.items()),
        f"bottleneck: {report.bottleneck} (processors {report.cpu_busy_frac:.0%} busy in the busiest phase)",
    ]
    if report.bottleneck == "cpu":
        lines.append("This run is void: the processors, not the simulated GPUs, were the limit.")
    if not report.went_up_and_down:
        lines.append("The regime did not rise and fall: see the phases above.")
    return "\n".join(lines)


def _slow_summary(report: DemoReport) -> str:
    """Return what became of the slow worker, in words."""
    slow = report.slow_worker
    if slow is None:
        return "No slow worker was found."
    text = (
        f"decode worker {slow.worker_id} was found {slow.factor:.1f} times slower after "
        f"{slow.found_after_s:.0f} s; of the picks it had {_percent(slow.share_before)} under Dynamo's "
        f"selection and {_percent(slow.share_after)} by marginal cost, where a fair share is "
        f"{_percent(slow.fair_share)}"
    )
    return text if slow.relieved else f"{text}: it was not relieved"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.0f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")
