"""What a person may ask about the split of workers: `dynamo-poa advise`.

Owns: its options, which of them go together.
Does not own: the answer (advise.py; live, the controller's own), its looks (advised.py), exit codes (cli.py).
Invariant: an option that belongs to another kind of question is refused, with all else that is wrong.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from dynamo_poa.config import CommonConfig, SloConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.show import console, read_duration_s
from dynamo_poa.serve.target import Target, ask, connected, find_target
from dynamo_poa.telemetry import TelemetryRecord, configure_logging

if TYPE_CHECKING:
    from dynamo_poa.serve.advise import Advised

_OF_TRACE = ("--topology", "--profile", "--speeds", "--kv-blocks", "--rate")
_OBJECTIVES = {"--ttft": "ttft_s", "--itl": "itl_s"}
_DURATION = "DURATION"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("advise")(advise)


def advise(
    recording: Annotated[Path | None, typer.Option(metavar="FILE", help="one that `record` wrote")] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="requests, in Mooncake's JSON lines; with --topology")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="3P/5D", help="workers that the trace is to be served by")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="of the trace's workers: a timing profile, as of calibrate"),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="or how fast such workers were: what `estimate --json` printed"),
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(help="of each of them, of 16 tokens; by default the profile's", min=1)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="of the trace, requests/s in the mean; by default its own", min=0.001)
    ] = None,
    ttft: Annotated[
        str | None, typer.Option(help="objective, such as 2s; live the controller's", metavar=_DURATION)
    ] = None,
    itl: Annotated[
        str | None, typer.Option(help="objective, such as 50ms; live the controller's", metavar=_DURATION)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="KV block size of the recorded graph, tokens")
    ] = None,
    nats: Annotated[
        str | None,
        typer.Option("--nats", envvar="NATS_SERVER", help="NATS server of the graph", metavar="URL"),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="namespace of the graph")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say whether workers are split well between prefill and decode. Live, of a recording or for a trace."""
    given = {
        "--topology": topology,
        "--profile": profile,
        "--speeds": speeds,
        "--kv-blocks": kv_blocks,
        "--rate": rate,
        "--ttft": ttft,
        "--itl": itl,
        "--block-size": block_size,
    }
    slo = _check(recording, trace, given)
    if recording is None and trace is None:
        _live(find_target(nats, namespace), as_json=as_json)
        return
    # imported here: scipy takes longer to import than the other commands take to run
    from dynamo_poa.serve.advise import of_recording
    from dynamo_poa.serve.advised import advised_view
    from dynamo_poa.serve.replay import encode

    configure_logging("error")
    if recording is not None:
        size = CommonConfig() if block_size is None else CommonConfig(block_size=block_size)
        found = of_recording(recording, size.block_size, slo)
    else:
        assert trace is not None
        assert topology is not None
        found = _of_trace(trace, topology, profile, speeds, kv_blocks, rate, slo)
    if as_json:
        sys.stdout.write(encode(found).decode() + "\n")
    else:
        console().print(advised_view(found))


def _check(recording: Path | None, trace: str | None, given: Mapping[str, object]) -> SloConfig:
    """Return the objectives.

    Raises:  ConfigError with every option that is wrong, or would change nothing, or is missing.
    """
    problems = []
    if recording is not None and trace is not None:
        problems.append("--recording, --trace: must be one of them")
    belongs_to = dict.fromkeys(_OF_TRACE, "--trace") if trace is None else {}
    if recording is None:
        belongs_to["--block-size"] = "--recording"
    if recording is None and trace is None:
        belongs_to |= dict.fromkeys(_OBJECTIVES, "--recording or --trace")
    problems += [
        f"{name}: must come with {other}" for name, other in belongs_to.items() if given[name] is not None
    ]
    if trace is not None and given["--topology"] is None:
        problems.append("--topology: must be given with --trace, such as 3P/5D")
    if trace is not None and (given["--profile"] is None) == (given["--speeds"] is None):
        problems.append("--profile, --speeds: must be one of them with --trace")
    objectives_s = {}
    for name, key in _OBJECTIVES.items():
        if (text := given[name]) is not None:
            try:
                objectives_s[key] = read_duration_s(name, str(text))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return SloConfig(**objectives_s)


def _of_trace(
    trace: str,
    topology: str,
    profile: str | None,
    speeds: Path | None,
    kv_blocks: int | None,
    rate_rps: float | None,
    slo: SloConfig,
) -> "Advised":
    from dynamo_poa.serve.advise import KV_BLOCKS, of_trace, read_split
    from dynamo_poa.serve.pool_speeds import speeds_of_profile, speeds_of_report

    split = read_split(topology)
    profiled, notes = None, []
    if profile is not None:
        curves, profiled, fits = speeds_of_profile(profile)
        notes.append(fits)
    else:
        assert speeds is not None
        curves = speeds_of_report(speeds)
    blocks = kv_blocks or profiled or KV_BLOCKS
    return of_trace(trace, split, curves, slo, kv_blocks=blocks, rate_rps=rate_rps, notes=notes)


def _live(target: Target, *, as_json: bool) -> None:
    """Print what the controller of a running graph advises."""
    from dynamo_poa.serve.advised import allocation_view

    configure_logging("error")

    async def now() -> tuple[str, TelemetryRecord]:
        async with connected(target, "advise") as bus:
            return target.told(bus.url), await ask(bus, target.namespace, {"op": "status"})

    where, record = asyncio.run(now())
    if as_json:
        told = {"allocation": record.allocation, "advice": record.poa_advice}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        return
    console().print(Text(where, style="dim"))
    console().print(allocation_view(record.allocation, record.poa_advice))
