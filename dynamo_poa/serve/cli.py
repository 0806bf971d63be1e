"""Decides what a person may type: `dynamo serve`, and `dynamo-poa` with `serve` and everything else.

Owns: the options of `serve`, exit codes, and that every error is a clear line on stderr.
Does not own: what the other commands do; their modules register them.
Invariant: no error a person can cause shows a traceback; 2 is "cannot be done as asked", 1 "failed while
           running".
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from dynamo_poa import __version__
from dynamo_poa.errors import BusError, ConfigError, PoaError, StartError
from dynamo_poa.serve.console import Console
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import START_TIMEOUT_S, serve_graph
from dynamo_poa.telemetry import configure_logging

# Click's, which some versions of Typer carry inside them: what was typed cannot be understood.
_UsageError: Any = typer.BadParameter.__bases__[0]
_INTERRUPTED = 130
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    graph: Annotated[str, typer.Argument(help="module:Component, such as graphs.disagg_poa:Frontend")],
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="YAML file, one section per component")
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option("--adaptive/--no-adaptive", help="PoaController.mode = active / off"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print configuration and command lines, start nothing")
    ] = False,
    start_timeout: Annotated[
        float, typer.Option(help="seconds the whole graph may take to come up", min=1)
    ] = START_TIMEOUT_S,
) -> None:
    """Serve a graph: NATS, workers, router, controller, frontend. Further options: --Component.key=value."""
    target, overrides = _sort_out([graph, *context.args])
    if adaptive is not None:
        overrides.append(f"PoaController.mode={'active' if adaptive else 'off'}")
    configure_logging("error")  # of the checks; the plan says how loud serving is
    plan = make_plan(target, file, overrides, check=not dry_run)
    if dry_run:
        sys.stdout.write(plan.text())
        return
    asyncio.run(_serve(plan, start_timeout))


async def _serve(plan: Plan, start_timeout_s: float) -> None:
    configure_logging(plan.log_level)
    console = Console(sys.stdout, [process.name for process in plan.processes] + ["serve"])
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    asked_to_stop = False

    def stop() -> None:
        nonlocal asked_to_stop
        if not asked_to_stop:  # once is enough: stopping has its own time limit
            asked_to_stop = True
            console.line("serve", "stopping")
            this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        async with serve_graph(plan, console.line, start_timeout_s=start_timeout_s) as running:
            console.line("serve", f"ready: {running.http_url}/v1/chat/completions (NATS {running.nats_url})")
            await running.wait()
    except asyncio.CancelledError:
        if not asked_to_stop:
            raise
    console.line("serve", "stopped")


def _sort_out(words: Sequence[str]) -> tuple[str, list[str]]:
    """Tell the graph from the overrides, in whatever order they were typed.

    `--Component.key value` reads as `--Component.key=value`, as in Dynamo's SDK. An option is never a value,
    and what is no `--Component.key` takes none.
    """
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        takes_value = before.startswith("--") and "." in before and "=" not in before
        if takes_value and "=" not in word and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    targets = [word for word in joined if not word.startswith("-") and "=" not in word]
    if not targets:
        raise ConfigError(["no graph given: must be module:Component, such as graphs.disagg_poa:Frontend"])
    joined.remove(targets[0])
    return targets[0], joined


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dynamo-poa {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="print the version and exit", callback=_show_version, is_eager=True)


def _app(help_text: str) -> typer.Typer:
    app = typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def options(version: Annotated[bool, _VERSION] = False) -> None:
        """Hold the options that come before a command; with it, a single command keeps its name."""

    app.command("serve", context_settings=_PASS_ON)(serve)
    return app


def dynamo_main() -> None:
    """Run `dynamo`: the command Dynamo shipped until 0.4, for our graphs."""
    _run(_app("Serve a graph of Dynamo components with adaptive routing."))


def main() -> None:
    """Run `dynamo-poa`."""
    try:
        from dynamo_poa.bench import demo
        from dynamo_poa.bench.suites import calibrate_command
        from dynamo_poa.bench.suites import command as bench
        from dynamo_poa.serve import advise_command, commands
    except KeyboardInterrupt:  # they take a second
        sys.exit(_INTERRUPTED)

    app = _app("Adaptive routing for NVIDIA Dynamo: serve a graph, watch it, steer it.")
    commands.register(app)
    advise_command.register(app)
    demo.register(app)
    bench.register(app)
    calibrate_command.register(app)
    _run(app)


def _run(app: Callable[..., object]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # τ is a ? rather than an error where it cannot be written
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False)  # so that its errors are told as ours are
    except _UsageError as error:
        text = error.format_message()
        if text.startswith("Usage:"):  # no command at all: the message is the help
            typer.echo(text, err=True)
            sys.exit(2)
        _fail([text[:1].lower() + text[1:].rstrip(".")], 2)
    except typer.Abort:
        sys.exit(_INTERRUPTED)
    except ConfigError as error:
        _fail(error.problems, 2)
    except BusError as error:
        _fail([str(error)], 2)
    except StartError as error:
        _fail([str(error)], 1)
    except PoaError as error:
        _fail([str(error)], 2)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(lines: Sequence[str], status: int) -> None:
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
