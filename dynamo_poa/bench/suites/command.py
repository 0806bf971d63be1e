"""`dynamo-poa bench`: run a suite, list them, report what was found.

Owns: the options, what Ctrl-C does, the list, which reports are written, the exit status.
Does not own: suites (catalogue.py), the steps of a run (session.py), what reports hold (page.py, summary.py).
Invariant: results are in DIR as soon as they exist; the same command goes on where the last one stopped.
"""

import asyncio
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynamo_poa.clock import SystemClock
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.show import console
from dynamo_poa.telemetry import configure_logging

if TYPE_CHECKING:  # suites take a second to import, and other commands do not need them
    from dynamo_poa.bench.suites.catalogue import Options
    from dynamo_poa.bench.suites.cells import Cell
    from dynamo_poa.bench.suites.session import Asked

FAILED, INTERRUPTED = 1, 130
_SEEDS = 3

_Seeds = Annotated[
    int, typer.Option(help="repetitions, each with other requests; 3 is the least for a verdict")
]
_Model = Annotated[str, typer.Option(help="timing of the simulated GPUs; by default the mock engine's own")]
_Trace = Annotated[
    str, typer.Option(help="a trace of your own for `workloads`, Mooncake JSONL", metavar="FILE")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    bench = typer.Typer(
        help="Policies side by side, on Dynamo's simulator and on live graphs.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    bench.command("run")(run)
    bench.command("list")(list_suites)
    bench.command("report")(report)
    app.add_typer(bench, name="bench")


def run(
    suite: Annotated[str, typer.Argument(help="one of `bench list`")],
    out: Annotated[Path, typer.Option("--out", help="folder for the results", metavar="DIR")],
    seeds: _Seeds = _SEEDS,
    only: Annotated[
        str, typer.Option(help="some cells: names of policies, fleets, workloads, loads", metavar="NAME,...")
    ] = "",
    model: _Model = "",
    trace: _Trace = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="set aside what DIR holds of it, begin anew")
    ] = False,
) -> None:
    """Run a suite's cells; go on where the last run stopped. Status 1: a cell failed or the disk is full."""
    from dynamo_poa.bench.suites import catalogue
    from dynamo_poa.bench.suites.session import Asked
    from dynamo_poa.bench.suites.store import StoreError

    configure_logging("error")
    options = _options(seeds, model, trace)
    words = tuple(word.strip() for word in only.split(",") if word.strip())
    cells = catalogue.suite(suite).cells(options)
    if trace:
        _survey(trace, suite, cells)
    cells = catalogue.chosen(cells, words)
    asked = Asked(suite=suite, cells=cells, folder=out, seeds=options.seeds, only=words, fresh=fresh)
    try:
        status = asyncio.run(_until_told(asked))
    except (StoreError, OSError) as error:  # stdout's disk may be full too
        told = f"error: {error}; what was finished is kept, the same command goes on from there"
        console(sys.stderr).print(told, soft_wrap=True)
        status = FAILED
    if status:
        raise typer.Exit(status)


def list_suites(seeds: _Seeds = _SEEDS, model: _Model = "", trace: _Trace = "") -> None:
    """List the suites with their engine, cells and about how long they take."""
    from rich.table import Table

    from dynamo_poa.bench.suites import baselines, catalogue
    from dynamo_poa.bench.suites.progress import duration

    options = _options(seeds, model, trace)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("suite", "engine", "cells", "about", "what"):
        table.add_column(title, justify="right" if title in ("cells", "about") else "left")
    for suite in catalogue.SUITES.values():
        cells = suite.cells(options)
        tuning = len(baselines.tuning_cells(cells))
        count = f"{len(cells)}" + (f" + {tuning}" if tuning else "")
        table.add_row(suite.name, suite.engines, count, duration(catalogue.estimated_s(cells)), suite.text)
    told = console()
    told.print(table)
    told.print(f"\ncells: with {seeds} seeds, + those that find KV routing's best static setting first")
    told.print(f"policies: live {', '.join(policy.name for policy in baselines.LIVE)};", soft_wrap=True)
    told.print(f"          replay {', '.join(policy.name for policy in baselines.REPLAY)}", soft_wrap=True)


def report(
    folder: Annotated[Path, typer.Argument(help="that `bench run` wrote to", metavar="DIR")],
) -> None:
    """Write a page with plots (HTML) and a summary (Markdown) of each suite in DIR, beside its results."""
    try:
        from dynamo_poa.bench.suites import page, summary
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError(["plots need matplotlib: pip install 'dynamo-poa[report]'"]) from error
    from dynamo_poa.bench.suites.baselines import TUNING_SUFFIX
    from dynamo_poa.bench.suites.store import read_all

    told = console()
    for contents in read_all(folder):
        for problem in contents.problems:
            told.print(problem, soft_wrap=True)
        name = contents.stamp.suite
        if name.endswith(TUNING_SUFFIX):  # what the best setting was chosen by, and no measurement
            continue
        try:
            page.write(contents.stamp, contents.results, folder / f"{name}.html")
            (folder / f"{name}.md").write_text(summary.markdown(contents.stamp, contents.results))
        except OSError as error:
            raise ConfigError([f"{folder}: cannot be written: {error.strerror}"]) from error
        told.print(f"{folder / name}.html, {folder / name}.md", soft_wrap=True)


def _options(seeds: int, model: str, trace: str) -> "Options":
    from dynamo_poa.bench.suites import catalogue

    if not 1 <= seeds <= catalogue.MAX_SEEDS:
        raise ConfigError([f"--seeds = {seeds}: must be in [1, {catalogue.MAX_SEEDS}]"])
    return catalogue.Options(seeds=tuple(range(1, seeds + 1)), model=model, trace=trace)


def _survey(trace: str, suite: str, cells: "Iterable[Cell]") -> None:
    """Refuse a trace that cannot be used before hours are spent on the rest; tell what is left out of one."""
    from dynamo_poa.workloads.synthetic import Trace
    from dynamo_poa.workloads.trace import survey

    if not any(isinstance(cell.content, Trace) for cell in cells):
        raise ConfigError(
            [f"--trace {trace}: suite {suite!r} replays none: must be of workloads or workloads-live"]
        )
    found = survey(trace)
    if found.requests < 2:
        raise ConfigError([f"--trace {trace}: holds {found.requests} request: must hold 2, one in each half"])
    if found.bad:
        console().print(f"trace {trace}: {found.text}", soft_wrap=True)


async def _until_told(asked: "Asked") -> int:
    """Run until it is done, or until Ctrl-C or SIGTERM: graphs and processes are then stopped in order."""
    from dynamo_poa.bench.suites.session import real_engines, run_suite

    told, this, interrupted = console(), asyncio.current_task(), False
    assert this is not None

    def stop() -> None:
        nonlocal interrupted
        if not interrupted:  # once is enough: stopping has its own time limit
            interrupted = True
            this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        complete = await run_suite(asked, real_engines(), told, SystemClock())
    except asyncio.CancelledError:
        if not interrupted:
            raise
        told.print("interrupted: what was finished is kept; the same command goes on from there")
        return INTERRUPTED
    return 0 if complete else FAILED
