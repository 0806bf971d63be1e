"""The demo's machinery from end to end, with phases too short for a regime to change."""

import json
from pathlib import Path

import pytest

from dynamo_poa.bench.demo import Phase, run

pytestmark = pytest.mark.dynamo

PHASES = (Phase("held", 12, 8, held=True), Phase("peak", 12, 8), Phase("calm again", 3, 3))


def test_the_demo_writes_what_it_saw(tmp_path: Path) -> None:
    """Issue: the JSON object of `make demo ARGS="--json FILE"`; what a regime does is not asked here.

    Issue 6: one decode worker is slow; the controller says which, and the plugin's selection spares it.
    """
    report = run(tmp_path / "demo.json", phases=PHASES)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert {"swaps", "swap_latency_s", "failed_requests", "bottleneck", "seconds", "phases"} <= written.keys()
    assert (written["failed_requests"], written["swaps"]) == (0, report.swaps)
    assert written["swap_latency_s"].keys() == {"median", "max"}
    assert written["bottleneck"] in ("simulated-gpu", "cpu")
    assert 9 < written["seconds"] < 120
    assert [phase["name"] for phase in written["phases"]] == ["held", "peak", "calm again"]
    for phase in written["phases"]:
        assert phase["requests"] > 0
        assert 0 < phase["ttft_p50_s"] <= phase["ttft_p99_s"] < phase["e2e_p99_s"] < 30
        assert phase["throughput_rps"] > 0
        assert phase["poa_hat"] is None or 1 <= phase["poa_hat"] < 50
        assert phase["regime"] in ("below", "transition", "saturated")
        assert (phase["router_temperature"], phase["overlap_weight"]) != (None, None)
    assert written["phases"][-1]["poa_hat"] is not None  # 8 snapshots need 8 s of load
    assert [phase["selection"] for phase in written["phases"]] == ["kv", "marginal", "marginal"]
    slow = written["slow_worker"]
    assert report.relieved, slow
    assert slow["factor"] > 2
    assert slow["fair_share"] == 0.25
    assert slow["share_after"] < slow["share_before"]
