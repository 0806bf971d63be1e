"""`dynamo-poa advise`: what it answers of a recording and of a trace, live, and what it refuses."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from dynamo_messages import FIXTURES
from nats_server import NatsServer
from records import RECORD
from shown import text
from test_advice import ADVICE, NOTHING_BETTER, UNKNOWN, found
from typer.testing import CliRunner

from dynamo_poa.bench.suites.profile_curves import curves_of
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import Advice, AllocationEstimate, Attainment, Split
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve import advise_command
from dynamo_poa.serve.advise import of_recording, of_trace, read_split
from dynamo_poa.serve.advised import advised_view, allocation_view, verdict
from dynamo_poa.serve.pool_speeds import speeds_of_profile, speeds_of_report
from dynamo_poa.serve.trace_demand import demand_of
from dynamo_poa.values import Curve, Role
from dynamo_poa.workloads.request import Request
from dynamo_poa.workloads.trace import write_mooncake

RECORDING = FIXTURES / "poa_2p4d_straggler.ndjson.gz"
CURVES = {
    Role.PREFILL: Curve(prefill_base_s=0.01, prefill_token_s=1e-4),
    Role.DECODE: Curve(decode_base_s=0.01, decode_request_s=2e-4),
}


def run(*arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    advise_command.register(app)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def problems(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    return caught.value.problems


# What it says


@pytest.mark.parametrize(
    ("allocation", "advice", "said"),
    [
        (
            found(),
            ADVICE,
            "3P/5D → 4P/4D: TTFT attainment 90 → 90 %, ITL 90 → 90 %, goodput +10 % (+5 to +15)",
        ),
        (
            found(),
            None,
            "leave the split 3P/5D for now: 4P/4D would gain +10.0% (+5.0% to +15.0%), "
            "but has not held for a minute",
        ),
        (
            found(low=-0.01),
            None,
            "leave the split 3P/5D: 4P/4D would gain +10.0% (-1.0% to +15.0%), within noise",
        ),
        (
            found(gain_frac=0.015, low=0.01, high=0.02),
            None,
            "leave the split 3P/5D: 4P/4D would gain +1.5% (+1.0% to +2.0%), too little to move workers for",
        ),
        (NOTHING_BETTER, None, "leave the split 3P/5D: no other gets more done within both objectives"),
        (
            AllocationEstimate(
                now=msgspec.structs.replace(ADVICE.now, goodput_rps=0.0),
                best=msgspec.structs.replace(ADVICE.then, ttft_frac=0.009),
            ),
            None,
            "leave the split 3P/5D: none gets requests done within both objectives",
        ),
        (UNKNOWN, None, "no advice: no decode workers"),
    ],
)
def test_the_verdict_is_a_line(allocation: AllocationEstimate, advice: Any, said: str) -> None:
    """Change, leave, or not known; always with its figures or its reason."""
    assert verdict(allocation, advice) == said
    assert text(allocation_view(allocation, advice)).splitlines()[0] == said


def test_the_splits_that_have_a_name_are_shown_once() -> None:
    """Present, advised, best and equilibrium may be one."""
    now, then, best = (
        Attainment(split=Split(n, 8 - n), ttft_frac=0.5, itl_frac=1.0, goodput_rps=rps)
        for n, rps in ((2, 1.0), (4, 2.0), (5, 2.01))
    )
    allocation = AllocationEstimate(
        poa_hat=2.01,
        now=now,
        best=best,
        equilibrium=best,
        target=then,
        gain_frac=1.0,
        gain_low=0.5,
        gain_high=1.5,
        one_more_prefill=0.25,
        one_more_decode=-0.001,
    )
    lines = text(allocation_view(allocation, None)).splitlines()[2:]
    assert [" ".join(line.split()) for line in lines] == [
        "split TTFT attained ITL attained goodput",
        "2P/6D 50.0% 100.0% 1.00/s present",
        "4P/4D 50.0% 100.0% 2.00/s advised",
        "5P/3D 50.0% 100.0% 2.01/s best, equilibrium",
        "",
        "PoA-hat 2.010, of the present split",
        "goodput +25.0% with one more prefill worker, -0.1% with one more decode worker",
    ]


# Of a recording


def test_a_recording_tells_what_was_asked_and_how_the_split_did() -> None:
    """2P/4D, closed-loop requests of 512 tokens; cards, speeds and prompts are the recording's own."""
    told = of_recording(RECORDING, 16, SloConfig(ttft_s=0.2, itl_s=1.0))
    assert told.asked.seconds == 18
    assert told.asked.rps == pytest.approx(74 / 18)
    assert told.asked.prompt_tokens == 512.0
    assert told.asked.uncached_tokens == pytest.approx(420.324, abs=0.001)
    assert told.asked.output_tokens == pytest.approx(78.16, abs=0.01)
    assert told.allocation.now is not None
    assert told.allocation.now.split == Split(2, 4)
    assert told.notes == ()


def test_the_same_recording_gives_the_same_json() -> None:
    """Byte for byte."""
    once, again = (run("--recording", str(RECORDING), "--itl", "200ms", "--json") for _ in range(2))
    assert once == again
    assert json.loads(once)["allocation"]["now"]["split"] == {"prefill": 2, "decode": 4}


def test_a_recording_without_decisions_says_what_is_lacking() -> None:
    """Passes alone tell speeds and not what was asked; inferred workers are noted."""
    printed = text(advised_view(of_recording(FIXTURES / "disagg_2p3d.ndjson.gz", 16, SloConfig())))
    assert "no advice: 0 prompts in 0 s, 50 in 10 s needed" in printed
    assert "note       workers inferred from forward passes, no cards recorded: 5" in printed


def test_workers_of_one_kind_have_no_split() -> None:
    """Case of an aggregated graph."""
    told = of_recording(FIXTURES / "agg_4w_smallcache.ndjson.gz", 16, SloConfig())
    assert "no advice: workers are aggregated: there is no split" in text(advised_view(told))


# For a trace


def write(path: Path, *requests: Request) -> str:
    write_mooncake(requests, 512, path)
    return str(path)


def request(at_s: float, blocks: tuple[int, ...], tokens: int, output: int = 10) -> Request:
    return Request(blocks=blocks, input_tokens=tokens, output_tokens=output, at_s=at_s)


def test_a_traces_demand_is_counted_by_the_second(tmp_path: Path) -> None:
    """Rows of requests, uncached tokens, their squares, tokens; a prefix is cached once it was asked for."""
    trace = write(
        tmp_path / "t.jsonl",
        request(100.0, (1, 2), 1000, output=10),
        request(100.9, (1, 2), 1000, output=20),
        request(102.5, (1, 3), 600, output=30),
    )
    seconds, output_tokens = demand_of(trace, 10_000, None)
    assert seconds[:, :4].tolist() == [[2, 1001, 1000**2 + 1, 2000], [0] * 4, [1, 88, 88**2, 600]]
    assert seconds[:, 4].tolist() == [2 * 1000**2, 0, 600**2]
    assert output_tokens == 20.0


def test_a_full_cache_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    """Room for two blocks: the third pushes out the first, unless that was used meanwhile."""
    trace = write(
        tmp_path / "t.jsonl",
        *(request(second, (block,), 512) for second, block in enumerate((1, 2, 1, 3, 1, 2))),
    )
    seconds, _ = demand_of(trace, 1024, None)
    assert seconds[:, 1].tolist() == [512, 512, 1, 512, 1, 512]
    seconds, _ = demand_of(trace, 0, None)
    assert seconds[:, 1].tolist() == [512] * 6


def test_a_rate_stretches_the_times(tmp_path: Path) -> None:
    """Half the rate, twice the gaps; where the file has no times they come evenly."""
    trace = write(tmp_path / "t.jsonl", *(request(second, (second,), 9) for second in (0, 1, 4)))
    assert demand_of(trace, 0, 0.25)[0][:, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 1]
    same = write(tmp_path / "s.jsonl", *(request(7, (number,), 9) for number in range(4)))
    assert demand_of(same, 0, 2.0)[0][:, 0].tolist() == [2, 2]


def test_a_trace_without_times_needs_a_rate(tmp_path: Path) -> None:
    """Else all would be asked at once, which is no rate."""
    trace = write(tmp_path / "t.jsonl", *(request(7, (number,), 9) for number in range(4)))
    with pytest.raises(ConfigError, match="all its requests come at one instant: give --rate"):
        demand_of(trace, 0, None)
    with pytest.raises(ConfigError, match="must be <= 1209600 s"):
        demand_of(trace, 0, 1e-6)


def test_a_trace_is_advised_on_what_workers_of_that_speed_would_do(tmp_path: Path) -> None:
    """20 prompts/s of 100 ms: one prefill worker does ten, two are full, three do."""
    requests = (request(number / 20, (2 * number, 2 * number + 1), 900, output=50) for number in range(1200))
    told = of_trace(
        write(tmp_path / "t.jsonl", *requests), read_split("1P/5D"), CURVES, SloConfig(ttft_s=1.0)
    )
    assert (told.asked.seconds, told.asked.rps, told.asked.output_tokens) == (60, 20.0, 50.0)
    assert told.advice is not None
    assert (told.advice.now.split, told.advice.then.split) == (Split(1, 5), Split(3, 3))
    assert told.advice.then.ttft_frac > 0.99
    shown = text(advised_view(told))
    assert shown.startswith(
        "asked      20.00 requests/s over 60 s, 900 prompt tokens, 900 uncached tokens, 50"
    )
    assert "objectives TTFT 1 s, ITL 0.05 s" in shown
    assert "note       a prompt's prefix is cached where one cache as large as those of 1P has it" in shown


def test_bad_lines_of_a_trace_are_noted(tmp_path: Path) -> None:
    """As `calibrate` and `bench` do: below one in a hundred they are left out and told."""
    path = tmp_path / "t.jsonl"
    write(path, *(request(number / 20, (2 * number, 2 * number + 1), 900) for number in range(1200)))
    path.write_text(path.read_text() + "{}\n")
    told = of_trace(str(path), Split(2, 2), CURVES, SloConfig())
    assert told.notes[-1].startswith("1 of 1201 lines are bad and left out: ")


# How fast workers are


def test_a_profile_is_fitted_and_says_how_well(tmp_path: Path) -> None:
    """A table that is linear is found exactly; what no pass of the engine reaches does not count."""
    tokens, kv, context = np.array([1.0, 1024, 8192, 65_536]), np.array([64.0, 4096]), np.array([16.0, 64])
    batch = kv[:, None] / context[None, :]
    np.savez(
        tmp_path / "p.npz",
        prefill_isl=tokens,
        prefill_ttft_ms=np.where(tokens > 8192, 1e9, 8 + 0.05 * tokens),
        decode_active_kv_tokens=kv,
        decode_context_length=context,
        decode_itl=6 + 0.25 * batch + 0.001 * kv[:, None],
    )
    prefill, decode = curves_of(tmp_path / "p.npz")
    assert msgspec.structs.astuple(prefill.curve) == pytest.approx((0.008, 5e-5, 0, 0, 0, 0))
    assert msgspec.structs.astuple(decode.curve) == pytest.approx((0, 0, 0.006, 2.5e-4, 1e-6, 0))
    assert (prefill.error_frac, decode.error_frac) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_a_profile_by_name_brings_its_kv_blocks() -> None:
    """The shipped ones; the fit is the note."""
    curves, kv_blocks, note = speeds_of_profile("b200-llama-70b-tp4")
    assert curves.keys() == {Role.PREFILL, Role.DECODE}
    assert kv_blocks == 102_104
    assert (
        note == "curves fitted to profile b200-llama-70b-tp4: prefill within 4%, decode within 2% in the mean"
    )


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    """By name, or a file that is something else."""
    (tmp_path / "p.npz").write_bytes(b"no tables")
    with pytest.raises(ConfigError, match="must be the mock engine's tables"):
        speeds_of_profile(str(tmp_path / "p.npz"))
    with pytest.raises(ConfigError, match="must be a path or one of b200-llama-70b-tp4"):
        speeds_of_profile("h100")


def test_measured_speeds_are_those_of_the_median_worker(tmp_path: Path) -> None:
    """A straggler does not speak for its pool, nor does a worker that has hardly worked."""
    path = tmp_path / "report.json"
    slow, usual, fresh = (Curve(decode_base_s=base_s) for base_s in (0.05, 0.01, 9.0))
    workers = [
        {"role": "prefill", "curve": CURVES[Role.PREFILL], "samples": 99.0, "factor": None},
        {"role": "decode", "curve": slow, "samples": 99.0, "factor": 5.0},
        {"role": "decode", "curve": usual, "samples": 99.0, "factor": 1.0},
        {"role": "decode", "curve": fresh, "samples": 2.0, "factor": None},
    ]
    path.write_bytes(msgspec.json.encode({"workers": workers, "more": 1}))
    assert speeds_of_report(path) == {Role.PREFILL: CURVES[Role.PREFILL], Role.DECODE: usual}
    path.write_bytes(msgspec.json.encode({"workers": workers[1:]}))
    with pytest.raises(ConfigError, match="has no prefill worker with 8 passes or more"):
        speeds_of_report(path)
    for data in (b"", b"{}", b"[1]"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="must be what dynamo-poa estimate --json printed"):
            speeds_of_report(path)
    with pytest.raises(ConfigError, match="No such file"):
        speeds_of_report(tmp_path / "absent")


@pytest.mark.parametrize(("base_s", "told"), [(-0.1, "-0.1"), (1e308, "1e+308")])
def test_speeds_that_no_worker_has_are_refused(tmp_path: Path, base_s: float, told: str) -> None:
    """Rule: bad input is refused: figures of it would be no numbers."""
    path = tmp_path / "report.json"
    workers = [
        {"role": "prefill", "curve": CURVES[Role.PREFILL], "samples": 99.0},
        {"role": "decode", "curve": Curve(decode_base_s=base_s), "samples": 99.0},
    ]
    path.write_bytes(msgspec.json.encode({"workers": workers}))
    with pytest.raises(ConfigError) as caught:
        speeds_of_report(path)
    assert caught.value.problems == (
        f"--speeds {path}: decode curve.decode_base_s = {told}: must be in [0, 3600]",
    )


def test_the_speeds_of_a_recording_serve_a_trace(tmp_path: Path) -> None:
    """`estimate --json` of one, `advise --trace` of the other."""
    from dynamo_poa.serve.replay import encode, replay

    report = tmp_path / "report.json"
    report.write_bytes(encode(replay(RECORDING, window=256, block_size=16)))
    trace = write(
        tmp_path / "t.jsonl", *(request(number / 4, (number,), 500, output=40) for number in range(200))
    )
    printed = run("--trace", trace, "--topology", "2P/4D", "--speeds", str(report), "--json")
    assert json.loads(printed)["allocation"]["now"]["split"] == {"prefill": 2, "decode": 4}


# What is refused


@pytest.mark.parametrize(
    "topology", ["8A", "3P", "3P5D", "0P/5D", "3P/0D", "501P/1D", "-1P/2D", "3p/5d", " 3P/5D", "٣P/5D", ""]
)
def test_a_bad_topology_is_refused_by_name_value_and_bound(topology: str) -> None:
    """Aggregated workers have no split."""
    with pytest.raises(ConfigError) as caught:
        read_split(topology)
    bound = "must be like 3P/5D, with 1 to 500 workers of a kind"
    assert caught.value.problems == (f"--topology = {topology!r}: {bound}",)


def test_options_that_do_not_go_together_are_all_named() -> None:
    """None is passed over in silence."""
    assert problems("--recording", "r", "--trace", "t") == (
        "--recording, --trace: must be one of them",
        "--topology: must be given with --trace, such as 3P/5D",
        "--profile, --speeds: must be one of them with --trace",
    )
    assert problems("--topology", "3P/5D", "--ttft", "2", "--block-size", "16", "--rate", "3") == (
        "--topology: must come with --trace",
        "--rate: must come with --trace",
        "--block-size: must come with --recording",
        "--ttft: must come with --recording or --trace",
        "--ttft = '2': must be a number with ms, s, m or h, such as 60s, > 0 and <= 720h",
    )
    both = ("--trace", "t", "--topology", "3P/5D", "--profile", "p", "--speeds", "s")
    assert problems(*both) == ("--profile, --speeds: must be one of them with --trace",)


def test_an_objective_out_of_bounds_is_refused() -> None:
    """The bounds are the controller's."""
    (problem,) = problems("--recording", str(RECORDING), "--itl", "2m")
    assert problem == "PoaController.slo.itl_s = 120.0: must be > 0 and <= 60"


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_trace_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    """Named, with what the system says."""
    arguments = ("--trace", str(tmp_path / name), "--topology", "1P/1D", "--profile", "b200-llama-70b-tp4")
    (problem,) = problems(*arguments)
    assert str(tmp_path / name) in problem


# Live


async def test_a_running_graph_is_told_as_its_controller_has_it(nats_server: NatsServer) -> None:
    """The estimate and the advice of the record that answers `status`; nothing is computed here."""
    record = msgspec.structs.replace(RECORD, allocation=found(), poa_advice=ADVICE)
    asked = []

    def answer(request: bytes) -> bytes:
        asked.append(json.loads(request))
        return msgspec.json.encode({"ok": True, **msgspec.to_builtins(record)})

    async with Bus(nats_server.url, name="controller", clock=SystemClock()) as bus:
        bus.respond("poa.poa.control", answer)
        await bus.wait_connected(5.0)
        printed = await asyncio.to_thread(run, "--nats", nats_server.url, "--namespace", "poa", "--json")
    assert asked == [{"op": "status"}]
    told = json.loads(printed)
    assert msgspec.convert(told["allocation"], AllocationEstimate) == found()
    assert msgspec.convert(told["advice"], Advice) == ADVICE
