"""The sweep over concurrencies: what a level takes from telemetry, when it is void, how it reads."""

import msgspec
import pytest
from records import RECORD
from shown import text

from dynamo_poa.bench.levels import Level, Slow, estimate_of, is_void, line, stragglers_of, tables
from dynamo_poa.bench.sweep import FLEETS, OVERRIDES, Fleet, main
from dynamo_poa.config import ControllerConfig, WorkerConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.values import Curve, Estimate, Mode, Regime, Role, Shares, WorkerKey, WorkerLatency

W = 14370722098883561847  # above 2**63
LEG = Estimate(
    poa_hat=1.75, low=1.7, high=1.8, samples=40, shares=Shares(miss=0.0, congestion=0.6, capacity=0.4)
)
LACKING = Estimate(reason="3 snapshots with 2 requests or more, 8 needed")
LEVEL = Level(
    fleet="one slow",
    concurrency=64,
    warm_up_s=7.5,
    seconds=20.0,
    requests=340,
    failed=0,
    throughput_rps=17.0,
    ttft_p50_s=0.25,
    ttft_p99_s=1.5,
    estimate=msgspec.structs.replace(LEG, legs={"decode": LEG, "prefill": LACKING}),
    regime=Regime.BELOW,
    stragglers=(Slow(worker_id=str(W), role="decode", factor=4.96),),
    cpu_busy_frac=0.5,
    cpu_own_frac=0.45,
    void=False,
)


def latency(worker_id: int, factor: float) -> WorkerLatency:
    return WorkerLatency(
        key=WorkerKey(worker_id, 0), role=Role.DECODE, curve=Curve(), factor=factor, straggler=True
    )


def test_a_level_shows_the_controllers_own_estimate_and_stragglers() -> None:
    """Nothing is estimated by the sweep; ids are text because JSON rounds them."""
    record = msgspec.structs.replace(
        RECORD,
        poa_hat=1.75,
        poa_low=1.7,
        poa_high=1.8,
        poa_samples=40,
        poa_method="marginal",
        poa_reason="prefill: nothing",
        poa_shares=LEG.shares,
        poa_legs={"decode": LEG},
        stragglers=(latency(7, 2.5), latency(W, 5.0)),
    )
    expected = msgspec.structs.replace(LEG, legs={"decode": LEG}, reason="prefill: nothing")
    assert estimate_of(record) == expected
    assert stragglers_of(record) == (
        Slow(worker_id=str(W), role="decode", factor=5.0),
        Slow(worker_id="7", role="decode", factor=2.5),
    )


@pytest.mark.parametrize(("busy", "void"), [(0.85, False), (0.851, True)])
def test_a_level_is_void_when_the_processors_were_the_limit(busy: float, void: bool) -> None:
    """As in the demo: above 85 % the machine may be what limits."""
    assert is_void(busy) is void
    level = msgspec.structs.replace(LEVEL, cpu_busy_frac=busy, void=void)
    assert ("VOID" in line(level)) is void


def test_a_level_reads_as_a_line_when_it_ends() -> None:
    """The straggler by its id and factor; failures only when there are some."""
    assert line(LEVEL) == (
        f"PoA-hat 1.750, 17.0 requests/s, TTFT P50 0.250 s, below, straggler {W} 5.0x, CPU 50% (45%)"
    )
    failed = msgspec.structs.replace(LEVEL, failed=3, estimate=LACKING, stragglers=())
    assert line(failed) == (
        f"PoA-hat - ({LACKING.reason}), 17.0 requests/s, TTFT P50 0.250 s, below, CPU 50% (45%), 3 failed"
    )


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_the_tables_show_each_level_overall_and_by_leg() -> None:
    """What is unknown is `-`; a leg without an estimate says what it lacks."""
    overall, decode, prefill = (text(table).splitlines() for table in tables([LEVEL]))
    assert cells(overall[4]) == [
        *("one slow", "64", "1.750", "1.700 to 1.800", "0%", "60%", "40%"),
        *("17.0", "0.250 s", "1.500 s", "below", f"{W} (decode) 5.0x", "50% (45%)"),
    ]
    assert decode[0].strip() == "decode leg"
    assert cells(decode[4]) == ["one slow", "64", "1.750", "1.700 to 1.800", "0%", "60%", "40%", ""]
    assert prefill[0].strip() == "prefill leg"
    assert cells(prefill[4]) == ["one slow", "64", *["-"] * 5, LACKING.reason]


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
def test_both_fleets_are_two_prefill_and_four_decode_workers(fleet: Fleet) -> None:
    """Like is compared with like: they differ in one worker's speed; routing is Dynamo's own."""
    plan = make_plan(
        "graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", (*OVERRIDES, *fleet.overrides), check=False
    )
    prefill, decode = plan.sections["PrefillWorker"], plan.sections["DecodeWorker"]
    controller = plan.sections["PoaController"]
    assert isinstance(prefill, WorkerConfig)
    assert isinstance(decode, WorkerConfig)
    assert isinstance(controller, ControllerConfig)
    assert (prefill.workers, prefill.args_of, decode.workers) == (2, {}, 4)
    assert decode.args_of == ({} if fleet is FLEETS[0] else {3: {"speedup-ratio": 0.05}})
    assert (controller.mode, controller.estimate_window_s) == (Mode.SHADOW, 20.0)


def test_a_result_that_could_not_be_written_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not after twelve minutes."""
    with pytest.raises(SystemExit) as caught:
        main(["--json", "/nowhere/sweep.json"])
    assert caught.value.code == 2
    assert "--json /nowhere/sweep.json: its folder must exist" in capsys.readouterr().err
