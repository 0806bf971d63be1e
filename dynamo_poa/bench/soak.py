"""`python -m dynamo_poa.bench.soak`: a live graph under load while its processes are killed and stopped.

Owns: the graph, the load, what is watched, the exit status.
Does not own: who is ended and when the graph is whole again (chaos.py), the verdict on a failed request and
              the goals (soak_report.py).
Invariant: nothing is judged here, and nothing that was sent is left out.
Source: issue 4. The mock engine runs at its GPU's speed and users are few, so that the processors are not
        what limits.
"""

import argparse
import asyncio
import contextlib
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from dynamo_poa.bench.chaos import KINDS, Chaos
from dynamo_poa.bench.load import ClosedLoop, LoadClient, Prompt, Result, prompts
from dynamo_poa.bench.processes import busy_frac, machine_time, resident_bytes, sockets
from dynamo_poa.bench.report import Figure, Machine, table, this_machine
from dynamo_poa.bench.soak_report import Failure, Hit, Leg, Sample, Seen, failures, figure
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import PoaError
from dynamo_poa.serve.child import Emit
from dynamo_poa.serve.graph import Stage
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.readiness import PROBE_TIMEOUT_S
from dynamo_poa.serve.supervisor import Running, serve_graph
from dynamo_poa.telemetry import configure_logging
from dynamo_poa.values import Role
from dynamo_poa.wire import Chosen, DecisionBatch, subject

ROUTERS = 2
USERS = 24
PROMPT_TOKENS = 128
OUT_TOKENS = (16, 64, 256)
REQUEST_S = 30.0  # a client gives up after so long, which is a violation
PAUSE_S = (3.0, 9.0)  # from whole to the next, drawn evenly
QUIET_FRAC = 0.45  # of the run, at its end: no router is touched, for longer than soak_report.SWEPT_S
SAMPLE_S = 2.0
WARM_UP_S = 5.0
SETTLE_S = 16.0  # without load: longer than any connection lingers
MB = 1e6

ENGINE = "{speedup-ratio: 1, num-gpu-blocks-override: 2048}"
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=2",
    f"PrefillWorker.args={ENGINE}",
    "DecodeWorker.workers=3",
    f"DecodeWorker.args={ENGINE}",
    f"PoaRouter.replicas={ROUTERS}",
    "PoaRouter.min_prefill_workers=1",
    "PoaRouter.min_decode_workers=1",
    "PoaRouter.drain_s=15",
)
ROLES = (Role.PREFILL, Role.DECODE)
_SAMPLE_LINE = re.compile(r'^(\w+)(?:\{(?:\w+="([^"]*)")?.*\})? (\S+)$', re.MULTILINE)


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    machine: Machine
    seed: int
    figure: Figure
    hits: list[Hit]
    failures: list[Failure]
    samples: list[Sample]


class Series(NamedTuple):
    """A number on /metrics: its name and the value of its first label."""

    name: str
    label: str


class Watch:
    """What a graph shows while it runs: decisions, and its routers' memory, sockets and counts."""

    def __init__(self, running: Running, http: aiohttp.ClientSession, clock: SystemClock) -> None:
        self._running, self._http, self._clock = running, http, clock
        self.names = [p.name for p in running.plan.processes if p.stage is Stage.ROUTERS]
        self.legs: dict[str, dict[Role, Leg]] = {}
        self._counts: dict[str, dict[Series, float]] = {}  # the last seen of each router process

    def on_batch(self, data: bytes) -> None:
        """Take a router's decisions."""
        batch = msgspec.msgpack.decode(data, type=DecisionBatch)
        for event in batch.events:
            if isinstance(event, Chosen):
                legs = self.legs.setdefault(event.request_id, {})
                before = legs.get(event.role)
                earlier = () if before is None else (*before.earlier, before.worker_id)
                legs[event.role] = Leg(event.worker_id, batch.router_id, earlier)

    async def routers(self, from_s: float) -> list[Sample]:
        """Look at every router process that is up."""
        found = []
        for name in self.names:
            pid = self._running.process(name).pid
            if pid is None or (counts := await self._read(name)) is None:
                continue
            router_id = f"{name}-{pid}"
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                sample = Sample(
                    at_s=self._clock.monotonic_s() - from_s,
                    router_id=router_id,
                    mb=resident_bytes(pid) / MB,
                    sockets=len(sockets(pid)),
                    in_flight=round(_total(counts, "poa_router_in_flight_requests")),
                    relay=_total(counts, "poa_router_relay_in_force") == 1,
                )
                self._counts[router_id] = counts
                found.append(sample)
        return found

    def counted(self, name: str) -> Counter[str]:
        """Return a counter by its first label, over all router processes, as of the last look at each."""
        found = Counter[str]()
        for counts in self._counts.values():
            found.update({s.label: round(value) for s, value in counts.items() if s.name == name})
        return found

    async def _read(self, name: str) -> dict[Series, float] | None:
        try:
            async with self._http.get(self._running.metrics_urls[name]) as answer:
                page = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        return {Series(of, label): float(value) for of, label, value in _SAMPLE_LINE.findall(page)}


@contextlib.asynccontextmanager
async def _load(
    running: Running, seed: int, results: list[Result], clock: SystemClock
) -> AsyncIterator[None]:
    """Keep users busy for as long as the block lasts."""
    url, common = urlsplit(running.http_url), running.plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    client = LoadClient(
        "127.0.0.1",
        url.port or 80,
        common.model_name,
        clock=clock,
        timeout_s=REQUEST_S,
        named=True,
        exact=True,
    )
    users = ClosedLoop(client, _mixed(seed), results.append, clock)
    users.resize(USERS)
    try:
        yield
    finally:
        await users.finish()


def _mixed(seed: int) -> Iterator[Prompt]:
    """Yield prompts for short and long answers without end."""
    rng = random.Random(seed)
    source = prompts(prompt_tokens=PROMPT_TOKENS, max_tokens=1, templates=5, shared_frac=0.25, seed=seed)
    return (Prompt(prompt.token_ids, rng.choice(OUT_TOKENS)) for prompt in source)


class _Sampling:
    """Looks at the routers every SAMPLE_S for as long as it is entered."""

    def __init__(self, watch: Watch, clock: SystemClock) -> None:
        self._watch, self._clock = watch, clock
        self.samples: list[Sample] = []
        self.from_s = clock.monotonic_s()

    async def __aenter__(self) -> Self:
        self.from_s = self._clock.monotonic_s()
        self._task = asyncio.create_task(self._run(), name="soak samples")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self.samples += await self._watch.routers(self.from_s)
            await self._clock.sleep(SAMPLE_S)


async def soak(
    minutes: float, seed: int, data_path: str, kinds: tuple[str, ...], say: Callable[[str], None], emit: Emit
) -> Seen:
    """Serve the graph, load it, end its processes, and return what was seen.

    Args:     kinds: of chaos.KINDS.  emit: gets every line the processes say.
    """
    clock, rng, results = SystemClock(), random.Random(seed), list[Result]()
    overrides = (*OVERRIDES, f"PoaRouter.data_path={data_path}")
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", overrides)
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with (
        serve_graph(plan, emit, clock) as running,
        Bus(running.nats_url, name="bench-soak", clock=clock) as bus,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        watch, chaos = Watch(running, http, clock), Chaos(running, http, rng, clock)
        bus.subscribe(subject(plan.namespace, "decisions"), lambda _, data: watch.on_batch(data))
        await bus.wait_connected(10.0)
        await chaos.whole()
        async with _load(running, seed, [], clock):
            await clock.sleep(WARM_UP_S)
        await clock.sleep(SETTLE_S)
        before = await watch.routers(clock.monotonic_s())
        machine, seconds = machine_time(), minutes * 60
        quiet_from_s = seconds * (1 - QUIET_FRAC)
        async with _Sampling(watch, clock) as sampling, _load(running, seed + 1, results, clock):
            now_s = 0.0
            while now_s < seconds:
                spared = () if now_s < quiet_from_s else ("router",)
                await clock.sleep(rng.uniform(*PAUSE_S))
                hit = await chaos.end_one(tuple(kind for kind in kinds if kind not in spared))
                now_s = clock.monotonic_s() - sampling.from_s
                bad = sum(not result.ok for result in results)
                say(
                    f"{now_s:.0f} s: {hit.signal} {hit.process}, whole again after {hit.back_s:.1f} s; "
                    f"{len(results)} requests, {bad} failed"
                )
        loaded_s = clock.monotonic_s() - sampling.from_s
        busy = busy_frac(machine, machine_time())
        await clock.sleep(SETTLE_S)
        last = await watch.routers(sampling.from_s)
    return Seen(
        seconds=loaded_s,
        quiet_s=loaded_s - quiet_from_s,
        results=results,
        legs=watch.legs,
        hits=chaos.hits,
        samples=sampling.samples,
        last=last,
        idle_before={one.router_id.rpartition("-")[0]: one.sockets for one in before},
        idle_after={one.router_id.rpartition("-")[0]: one.sockets for one in last},
        retries=watch.counted("poa_router_retries_total").total(),
        handed_on=watch.counted("poa_router_relay_handed_on_total"),
        unasked=chaos.unasked(),
        busy_frac=busy,
    )


def _total(counts: dict[Series, float], name: str) -> float:
    return sum(value for series, value in counts.items() if series.name == name)


async def _terminable(run: Coroutine[Any, Any, Seen]) -> Seen:
    """Cancel the run at SIGTERM, so that its servers stop; uvloop drops what a handler raises."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await run


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dynamo_poa.bench.soak", description="Load while processes end")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and the load (1)")
    parser.add_argument("--data-path", choices=("relay", "stream"), default="relay", help="(relay)")
    parser.add_argument("--only", default=",".join(KINDS), help=f"end some of {', '.join(KINDS)}")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write there what the processes say")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.minutes <= 24 * 60:
        parser.error(f"--minutes {arguments.minutes:g}: must be > 0 and <= 1440")
    arguments.only = tuple(kind.strip() for kind in arguments.only.split(","))
    if not set(arguments.only) <= set(KINDS) or set(arguments.only) == {"router"}:  # spared at the end
        parser.error(
            f"--only {','.join(arguments.only)}: must be some of {', '.join(KINDS)}, not router alone"
        )
    for key, path in (("--json", arguments.json), ("--log", arguments.log)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{key} {path}: its folder must exist")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Soak, print, write; return 1 when a goal was not reached."""
    arguments = _arguments(argv)
    configure_logging("error")
    console = Console(width=None if sys.stdout.isatty() else 140)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with arguments.log.open("w") if arguments.log else contextlib.nullcontext() as log:

        def emit(name: str, line: str) -> None:
            if log is not None:
                log.write(f"{time.time():.3f} {name} | {line}\n")

        run = soak(arguments.minutes, arguments.seed, arguments.data_path, arguments.only, say, emit)
        try:
            seen: Seen = uvloop.run(_terminable(run))
        except PoaError as error:
            say(f"ended early: {error}")
            return 1
        except asyncio.CancelledError:
            say("ended early: SIGTERM")
            return 128 + signal.SIGTERM
    failed = failures(seen, ROLES)
    result = figure(seen, failed, ROUTERS if arguments.data_path == "relay" else 0)
    console.print(table((result,), {}))
    for condition in result.conditions:
        say(f"  {condition}")
    if arguments.json is not None:
        report = SoakReport(
            machine=this_machine(),
            seed=arguments.seed,
            figure=result,
            hits=seen.hits,
            failures=failed,
            samples=seen.samples,
        )
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if result.reached else 1


if __name__ == "__main__":
    sys.exit(main())
