"""What a person may ask of a running graph, or of a recording of one: `watch` to `explain`.

Owns: their options, the checks before anything is sent, what is printed.
Does not own: exit codes (cli.py), the views (view.py, report.py, explained.py), what the controller does
              (control.py).
Invariant: nothing is sent that the controller would refuse for its form; results go to stdout, the rest to
           stderr.
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig, ControllerConfig
from dynamo_poa.errors import ConfigError, ParamsError
from dynamo_poa.serve.games_view import in_words_view
from dynamo_poa.serve.record import record as record_until
from dynamo_poa.serve.report import report_view
from dynamo_poa.serve.show import console, read_duration_s, read_instant_s
from dynamo_poa.serve.target import ask, connected, find_target
from dynamo_poa.serve.view import parameters, record_view
from dynamo_poa.serve.watch import watch_json, watch_live
from dynamo_poa.telemetry import TelemetryRecord, configure_logging
from dynamo_poa.values import ParamsKind, RouterParams

SETTLE_S = 2.0  # within this a change should be in force: a tick is 0.25 s by default
SETTLE_TICKS = 2  # the tick that runs when a request comes may have looked already

_Nats = Annotated[
    str | None,
    typer.Option("--nats", envvar="NATS_SERVER", help="NATS server of the graph", metavar="URL"),
]
_Namespace = Annotated[
    str | None, typer.Option(help="namespace of the graph; by default that of the one that is running")
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON")]
_BlockSize = Annotated[int, typer.Option(help="KV block size of the recorded graph, tokens")]
_DEFAULT_BLOCK_SIZE = CommonConfig().block_size
_DURATION = "DURATION"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("watch")(watch)
    app.command("status")(status)
    app.command("set")(set_parameters)
    app.command("release")(release)
    app.command("record")(record)
    app.command("estimate")(estimate)
    app.command("explain")(explain)


def watch(nats: _Nats = None, namespace: _Namespace = None, as_json: _Json = False) -> None:
    """Show regime, PoA-hat, TTFT and parameters as they change. With --json, one record a line."""
    target = find_target(nats, namespace)
    if not as_json and not sys.stdout.isatty():
        raise ConfigError(["standard output is no terminal: use watch --json, or status"])
    _run_until_told(watch_json(target) if as_json else watch_live(target))


def status(nats: _Nats = None, namespace: _Namespace = None, as_json: _Json = False) -> None:
    """Show what the controller decides right now."""
    where, now = asyncio.run(_ask(nats, namespace, {"op": "status"}))
    if as_json:
        sys.stdout.write(msgspec.json.encode(now).decode() + "\n")
    else:
        _tell(where)
        console().print(record_view(now))


def set_parameters(
    router_temperature: Annotated[float, typer.Option(help="τ: 0 always takes the cheapest worker")],
    overlap_weight: Annotated[float, typer.Option(help="ω: weight of what a worker's cache holds")],
    duration: Annotated[
        str | None,
        typer.Option("--for", help="such as 500ms, 60s, 5m, 1h; by default until release", metavar=_DURATION),
    ] = None,
    nats: _Nats = None,
    namespace: _Namespace = None,
) -> None:
    """Pin the router's parameters, both together. The policy no longer moves them."""
    for_s, problems = None, []
    # One value at a time, so that both are named when both are wrong.
    for values in ((router_temperature, 0.0), (0.0, overlap_weight)):
        try:
            RouterParams(revision=0, router_temperature=values[0], overlap_weight=values[1])
        except ParamsError as error:
            problems.append(str(error))
    if duration is not None:
        try:
            for_s = read_duration_s("--for", duration)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    request = {
        "op": "set",
        "router_temperature": router_temperature,
        "overlap_weight": overlap_weight,
        "for_s": for_s,
    }
    where, now = asyncio.run(_ask(nats, namespace, request, settle=True))
    _tell(where)
    in_force = "" if now.kind is ParamsKind.PIN else f"accepted, not in force after {SETTLE_S:g} s: "
    typer.echo(f"{in_force}{parameters(now)}")


def release(
    forget: Annotated[
        bool, typer.Option("--forget", help="the policy begins anew, without what it has learnt")
    ] = False,
    nats: _Nats = None,
    namespace: _Namespace = None,
) -> None:
    """Give the parameters back to the policy."""
    where, now = asyncio.run(_ask(nats, namespace, {"op": "release", "forget": forget}, settle=True))
    _tell(where)
    typer.echo(parameters(now))


def record(
    file: Annotated[Path, typer.Argument(help="NDJSON, one message a line; replaced when it exists")],
    duration: Annotated[
        str | None, typer.Option("--for", help="such as 30s; by default until Ctrl-C", metavar=_DURATION)
    ] = None,
    nats: _Nats = None,
    namespace: _Namespace = None,
) -> None:
    """Record what a graph sends. Event plane, decisions, workers' cards, parameters and telemetry."""
    duration_s = None if duration is None else read_duration_s("--for", duration)
    _run_until_told(record_until(find_target(nats, namespace), file, duration_s))


def estimate(
    recording: Annotated[Path, typer.Argument(help="file that `record` wrote")],
    as_json: _Json = False,
    window: Annotated[
        int, typer.Option(help="decisions of each leg that the frozen PoA-hat is computed over")
    ] = ControllerConfig().window,
    block_size: _BlockSize = _DEFAULT_BLOCK_SIZE,
) -> None:
    """Compute PoA-hat, speeds, TTFT and outcomes from a recording. The code is the live controller's."""
    # imported here: scipy takes longer to import than the other commands take to run
    from dynamo_poa.serve.replay import encode, replay

    ControllerConfig(window=window), CommonConfig(block_size=block_size)  # refuse what is out of bounds
    report = replay(recording, window=window, block_size=block_size)
    if as_json:
        sys.stdout.write(encode(report).decode() + "\n")
    else:
        console().print(report_view(report))


def explain(
    recording: Annotated[
        Path | None, typer.Argument(help="file that `record` wrote; without one, the running graph now")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="seconds since its first message, such as 12.5", metavar="T")
    ] = None,
    as_json: _Json = False,
    block_size: _BlockSize = _DEFAULT_BLOCK_SIZE,
    nats: _Nats = None,
    namespace: _Namespace = None,
) -> None:
    """Say where the cost is from. Of a recording also who should have been where, and what it saved."""
    if recording is None:
        if at is not None:
            raise ConfigError(
                [f"--at = {at!r}: needs a recording; a running graph is explained as it is now"]
            )
        where, now = asyncio.run(_ask(nats, namespace, {"op": "status"}))
        if as_json:
            sys.stdout.write(msgspec.json.encode(now.coupling).decode() + "\n")
        else:
            _tell(where)
            console().print(in_words_view(now))
        return
    if at is None:
        raise ConfigError(["--at: must be given with a recording, in seconds since its first message"])
    from dynamo_poa.serve.explain import explain as explain_instant
    from dynamo_poa.serve.explained import explanation_view
    from dynamo_poa.serve.replay import encode

    CommonConfig(block_size=block_size)
    explanation = explain_instant(recording, read_instant_s("--at", at), block_size=block_size)
    if as_json:
        sys.stdout.write(encode(explanation).decode() + "\n")
    else:
        console().print(explanation_view(explanation))


async def _ask(
    nats: str | None, namespace: str | None, request: dict[str, Any], *, settle: bool = False
) -> tuple[str, TelemetryRecord]:
    """Return which graph was asked and its controller's record.

    With `settle` the record is one made after the controller heeded the request, if it does in time.
    """
    configure_logging("error")
    target, clock = find_target(nats, namespace), SystemClock()
    async with connected(target, str(request["op"])) as bus:
        now = await ask(bus, target.namespace, request)
        until_tick, until_s = now.tick + SETTLE_TICKS, clock.monotonic_s() + SETTLE_S
        while settle and now.tick < until_tick and clock.monotonic_s() < until_s:
            await clock.sleep(0.05)
            now = await ask(bus, target.namespace, {"op": "status"})
        return target.told(bus.url), now


def _tell(where: str) -> None:
    """Say which graph the rest is about: who runs several must not read or change the wrong one."""
    console().print(Text(where, style="dim"))


def _run_until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run until it is done, or until Ctrl-C or SIGTERM, which are the ordinary ways to end."""

    async def run() -> None:
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        assert this is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, this.cancel)
        with suppress(asyncio.CancelledError):
            await work

    configure_logging("error")
    asyncio.run(run())
