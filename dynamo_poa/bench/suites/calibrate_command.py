"""What a person may ask of `dynamo-poa calibrate`.

Owns: its options, the progress bar, what goes to stdout.
Does not own: the search (calibrate.py), the YAML (fragment.py), exit codes (cli.py).
Invariant: stdout is the fragment and nothing else.
"""

import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dynamo_poa.errors import ConfigError
from dynamo_poa.telemetry import configure_logging

if TYPE_CHECKING:  # the search takes a second to import, and other commands do not need it
    from dynamo_poa.bench.suites.calibrate import Calibration
    from dynamo_poa.bench.suites.cells import Cell, Result


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("calibrate")(calibrate_trace)


def calibrate_trace(
    trace: Annotated[str, typer.Option("--trace", metavar="FILE", help="requests, in Mooncake's JSON lines")],
    topology: Annotated[
        str, typer.Option(metavar="4P/4D|8A", help="prefill and decode workers, or aggregated ones")
    ],
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="timing of a worker: a name (a wrong one lists them), an npz file of the mock engine's, or "
            "a folder of Dynamo's profiler; by default the engine's own",
        ),
    ] = "",
    kv_blocks: Annotated[int, typer.Option(help="of each worker, of 16 tokens; 0: the profile's", min=0)] = 0,
    requests: Annotated[int, typer.Option(help="of each half of the trace, at most; 0: all", min=0)] = 3000,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="also write all findings")
    ] = None,
) -> None:
    """Replay a trace in Dynamo's simulator; print the thresholds and parameters it asks for, as YAML."""
    from dynamo_poa.bench.report import MeasurementError
    from dynamo_poa.bench.suites import replayed
    from dynamo_poa.bench.suites.calibrate import calibrate, fleet_of, runs_at_most
    from dynamo_poa.bench.suites.fragment import yaml_of
    from dynamo_poa.workloads.trace import survey

    configure_logging("error")
    if json_file and not Path(json_file).parent.is_dir():
        raise ConfigError([f"--json {json_file}: must be in a folder that exists"])
    fleet = fleet_of(topology, profile, kv_blocks)
    if left_out := survey(trace).text:
        typer.echo(f"trace {trace}: {left_out}", err=True)
    with _progress() as progress, replayed.pool() as pool:
        task = progress.add_task("replaying", total=runs_at_most())

        def run(cells: "Sequence[Cell]") -> "list[Result]":
            results = []
            try:
                for result in pool.map(replayed.run, cells):
                    results.append(result)
                    progress.advance(task)
            except BrokenProcessPool as error:
                raise MeasurementError("the simulator's process died") from error
            return results

        found = calibrate(trace, fleet, run, requests)
    sys.stdout.write(yaml_of(found))
    if json_file:  # what was found is told by now, should this fail
        _write(found, Path(json_file))


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _write(found: "Calibration", path: Path) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError([f"--json {path}: cannot be written: {error.strerror or error}"]) from error
