"""What is found on a trace, with a simulator made of formulas; and the YAML that tells it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from traces import real_trace

from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import replayed
from dynamo_poa.bench.suites.calibrate import (
    DEFAULT,
    LoadPoint,
    Setting,
    calibrate,
    fleet_of,
    knee,
    runs_at_most,
    settings,
)
from dynamo_poa.bench.suites.calibrate_command import calibrate_trace
from dynamo_poa.bench.suites.cells import Cell, Policy, Result
from dynamo_poa.bench.suites.fragment import yaml_of
from dynamo_poa.bench.suites.paired import compare
from dynamo_poa.config import ControllerConfig, PolicyConfig, RegimeConfig, RouterConfig, load_sections
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.workloads.arrivals import Closed, TraceTimes
from dynamo_poa.workloads.synthetic import Trace

CAPACITY_RPS = 10.0
GOOD = Setting(overlap_weight=2.0, overlap_key="prefill_load_scale")


class Formulas:
    """A simulator whose mean TTFT is 1 / (1 - load), ten times that beyond capacity.

    gain:   what GOOD's TTFT is multiplied by at the knee and above, by half
    """

    def __init__(self, gain: dict[str, float], *, e2e_factor: float = 1.0) -> None:
        self._gain, self._e2e_factor = gain, e2e_factor
        self.cells: list[Cell] = []

    def __call__(self, cells: Sequence[Cell]) -> list[Result]:
        self.cells += cells
        return [self._result(cell) for cell in cells]

    def _result(self, cell: Cell) -> Result:
        part = cell.content.part  # type: ignore[union-attr]
        load = 1.0
        if isinstance(cell.load, TraceTimes):
            load = min(cell.load.speedup / CAPACITY_RPS, 0.9 + cell.load.speedup / CAPACITY_RPS / 100)
        ttft_s = 1 / (1 - min(load, 0.9)) * (1 + cell.seed / 1000)
        good = cell.policy == GOOD.policy
        if good:
            ttft_s *= self._gain[part] if load >= 0.45 else 1.1
        elif cell.policy != DEFAULT.policy:
            ttft_s *= 1.2
        throughput = CAPACITY_RPS * (1.0 if isinstance(cell.load, Closed) and cell.load.users > 100 else 0.9)
        e2e_s = (ttft_s + 5) * (self._e2e_factor if good else 1.0)
        figures = {
            "ttft_mean_s": ttft_s,
            "ttft_p99_s": 3 * ttft_s,
            "e2e_mean_s": e2e_s,
            "throughput_rps": throughput,
        }
        return Result(cell=cell, state="done", figures=figures)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a trace of one request a second, so that a speedup is a rate."""
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 100, "output_length": 10, "hash_ids": [1]}
    path.write_text("".join(json.dumps({"timestamp": 1000 * n} | line) + "\n" for n in range(2002)))
    return str(path)


def test_a_setting_that_wins_on_both_halves_is_taken_where_it_wins(trace: str):
    """Worked: capacity 10; mean TTFT 4/3, 2, 10/3 at 2.5, 5, 7 requests/s has doubled at 6."""
    run = Formulas({"first": 0.8, "second": 0.9})
    found = calibrate(trace, fleet_of("4P/4D"), run)
    assert found.capacity_rps == CAPACITY_RPS
    assert found.knee_rps == pytest.approx(6.0, abs=0.01)
    assert [choice.setting for choice in found.choices] == [DEFAULT, GOOD, GOOD]
    assert found.overlap_key == "prefill_load_scale"
    verified = found.choices[1].verified
    assert verified is not None
    assert (verified.verdict, verified.ratio) == ("better", pytest.approx(0.9))
    assert {cell.content.part for cell in run.cells if cell.seed > 10} == {"second"}  # type: ignore[union-attr]
    assert len(run.cells) < runs_at_most()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Formulas({"first": 0.8, "second": 1.0}), "+0.0 % (+0.0 to +0.0): no difference on the second half"),
        (Formulas({"first": 0.8, "second": 1.3}), "+30.0 % (+30.0 to +30.0): worse on the second half"),
        (Formulas({"first": 0.8, "second": 0.9}, e2e_factor=1.5), "e2e_mean_s"),
        (Formulas({"first": 1.1, "second": 0.5}), "no setting did better on the first half"),
    ],
)
def test_the_defaults_stay_where_nothing_beats_them(trace: str, run: Formulas, why: str):
    """Luck on the first half, a gain paid elsewhere and no gain at all are no reason to change anything."""
    found = calibrate(trace, fleet_of("4P/4D"), run)
    assert found.leaves_defaults
    assert "leave the defaults" in found.choices[1].why
    assert why in found.choices[1].why
    assert yaml_of(found).endswith("PoaController:\n  policy:\n    name: static\n")


def test_serve_takes_the_fragment_as_it_is(trace: str, tmp_path: Path):
    """Issue 5: a YAML fragment that `serve` accepts; every value arrives where it belongs."""
    path = tmp_path / "calibrated.yaml"
    path.write_text(yaml_of(calibrate(trace, fleet_of("4P/4D"), Formulas({"first": 0.8, "second": 0.9}))))
    sections = load_sections(path, {"PoaRouter": RouterConfig, "PoaController": ControllerConfig})
    assert sections["PoaRouter"] == RouterConfig(overlap_key="prefill_load_scale")
    assert sections["PoaController"].policy == PolicyConfig(
        below=(0.0, 1.0), transition=(0.0, 2.0), saturated=(0.0, 2.0)
    )
    regime = sections["PoaController"].regime
    assert (regime.theta1, regime.theta2) == (2.0, 7.5)
    assert (regime.window_s, regime.confirm_s, regime.dwell_s) == (5, 6, 7)
    plan = make_plan("graphs.disagg_poa:Frontend", str(path), check=False)
    assert "overlap_key: prefill_load_scale" in plan.text()


def test_the_fragment_says_leave_the_defaults_and_serve_takes_that_too(trace: str, tmp_path: Path):
    """Nothing better was found: a controller that never moves, and Dynamo's own parameters."""
    path = tmp_path / "calibrated.yaml"
    path.write_text(yaml_of(calibrate(trace, fleet_of("8A"), Formulas({"first": 0.8, "second": 1.0}))))
    assert "# leave the defaults: nothing beat them\n" in path.read_text()
    sections = load_sections(path, {"PoaRouter": RouterConfig, "PoaController": ControllerConfig})
    assert sections["PoaController"] == ControllerConfig(policy=PolicyConfig(name="static"))
    assert sections["PoaRouter"] == RouterConfig()


def test_the_window_stays_where_samples_suffice(trace: str):
    """The controller's own window is changed only where it would see fewer than `min_samples`."""
    found = calibrate(trace, fleet_of("4P/4D"), Formulas({"first": 0.8, "second": 0.9}))
    assert RegimeConfig().window_s * found.knee_rps < 1.5 * RegimeConfig().min_samples
    assert "window_s: 5  # 3 s hold 18 requests at the knee: few for min_samples = 20" in yaml_of(found)


def test_the_knee_lies_between_the_points_around_it():
    """Worked: mean TTFT 1, 1.5, 3 at 1, 2 and 3 requests/s is 2 a third of the way from the second."""
    points = [
        LoadPoint(offered_rps=rate, throughput_rps=rate, ttft_mean_s=ttft_s, ttft_p99_s=ttft_s)
        for rate, ttft_s in ((1.0, 1.0), (2.0, 1.5), (3.0, 3.0))
    ]
    assert knee(points) == pytest.approx(7 / 3)
    with pytest.raises(MeasurementError, match=r"no knee: at 2 requests/s mean TTFT is 1\.50 times"):
        knee(points[:2])


def test_only_what_serve_can_be_told_is_tried():
    """ω is at most 2, whichever of Dynamo's settings it becomes; the other one stays 1."""
    assert (len(settings("overlap_score_credit")), len(settings("prefill_load_scale"))) == (11, 8)
    assert all(
        s.overlap_weight <= 2 for s in settings("overlap_score_credit") + settings("prefill_load_scale")
    )
    assert GOOD.policy == Policy(name=GOOD.text, prefill_load_scale=2.0)


@pytest.mark.parametrize("topology", ["4P", "0P/2D", "4D/4P", "1A", "1P/1D", ""])
def test_a_topology_that_gives_a_router_nothing_to_do_is_refused(topology: str):
    """One worker of each kind is no choice."""
    with pytest.raises(ConfigError, match="topology = "):
        fleet_of(topology)


def test_more_workers_than_closed_loops_can_load_are_refused():
    """The bound is said of what was typed, and not of the users that follow from it."""
    with pytest.raises(ConfigError, match=r"topology = '2P/501D': must have at most 500 workers of a kind"):
        fleet_of("2P/501D")
    assert fleet_of("500A").decode == 500


def test_a_profile_brings_its_own_memory():
    """KV blocks are those that fit beside the model's weights, unless said otherwise; four in one."""
    assert fleet_of("8A").block_tokens == 64
    assert fleet_of("8A").kv_blocks == 16_384 // 4
    assert fleet_of("2P/1D", "b200-llama-70b-tp4").kv_blocks == 102_104 // 4
    assert fleet_of("2P/1D", "b200-llama-70b-tp4", 500).kv_blocks == 125


def test_a_trace_of_one_instant_is_refused(tmp_path: Path):
    """It has no rate that could be raised."""
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}
    path.write_text((json.dumps(line) + "\n") * 10)
    with pytest.raises(ConfigError, match="--requests = 0: the 5 requests taken come at one instant"):
        calibrate(str(path), fleet_of("8A"), Formulas({}))
    with pytest.raises(ConfigError, match="--requests = 1: the 1 requests taken come at one instant"):
        calibrate(str(path), fleet_of("8A"), Formulas({}), requests=1)


def calibrated(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `dynamo-poa calibrate`."""
    command = [sys.executable, "-c", "from dynamo_poa.serve.cli import main; main()", "calibrate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_prints_the_fragment_alone_and_writes_the_findings(tmp_path: Path):
    """On Dynamo's simulator, all the way: stdout can be piped to a file that `serve` reads."""
    trace, findings = tmp_path / "trace.jsonl", tmp_path / "found.json"
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 2000,
            "output_length": 2,
            "hash_ids": [n % 7, *range(7 + 3 * n, 10 + 3 * n)],
        }
        for n in range(600)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{\n")
    fleet = ("--topology", "2A", "--kv-blocks", "4096")
    done = calibrated("--trace", str(trace), *fleet, "--json", str(findings))
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"trace {trace}: 1 of 601 lines are bad and left out: {trace}:601: Input data was truncated\n"
    )
    fragment = tmp_path / "calibrated.yaml"
    fragment.write_text(done.stdout)
    load_sections(fragment, {"PoaRouter": RouterConfig, "PoaController": ControllerConfig})
    found = json.loads(findings.read_text())
    assert (found["requests"], found["fleet"]["kv_blocks"], len(found["choices"])) == (300, 1024, 3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--topology", "many"), "error: topology = 'many': must be like 4P/4D or 8A"),
        (
            ("--topology", "2A", "--profile", "h100"),
            "error: profile = 'h100': must be a path or one of b200-",
        ),
        (("--topology", "2A", "--trace", "nowhere.jsonl"), "error: trace nowhere.jsonl: cannot be read"),
        (("--topology", "2A", "--json", "no/x"), "error: --json no/x: must be in a folder that exists"),
    ],
)
def test_what_cannot_be_calibrated_is_one_clear_line(trace: str, words: tuple[str, ...], problem: str):
    """2 is "cannot be done as asked"; no traceback."""
    done = calibrated("--trace", trace, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(problem)
    assert done.stderr.count("\n") == 1


def test_a_simulator_that_dies_is_one_clear_line_too(trace: str, monkeypatch: pytest.MonkeyPatch):
    """Memory may run out: nothing is proposed on half of the runs."""

    class Dying(ThreadPoolExecutor):
        def map(self, *_: object, **__: object) -> Iterator[Result]:  # type: ignore[override]
            raise BrokenProcessPool("killed")

    monkeypatch.setattr(replayed, "pool", lambda: Dying(1))
    with pytest.raises(MeasurementError, match="the simulator's process died"):
        calibrate_trace(trace, "2A")


@pytest.mark.shared
def test_on_a_real_trace_more_credit_for_the_cache_beats_the_default_by_5_percent():
    """Issue 5: mean TTFT near the knee, on the half that the setting was not found on; 8 seeds."""
    path = str(real_trace("mooncake_conversation_a.jsonl"))
    half = Trace(path=path, part="second")
    load = TraceTimes(speedup=2.37, spread_s=3.0)  # 8 requests/s, 0.9 of what the fleet can do
    fleet = fleet_of("4P/4D", "b200-llama-70b-tp4")
    cells = [
        Cell(suite="test", engine="replay", fleet=fleet, content=half, load=load, policy=s.policy, seed=seed)
        for s in (Setting(overlap_weight=2.0), DEFAULT)
        for seed in range(1, 9)
    ]
    with replayed.pool() as pool:
        results = list(pool.map(replayed.run, cells))
    found = compare(results[:8], results[8:], "ttft_mean_s")
    assert found.verdict == "better", found.text
    assert found.ratio is not None
    assert found.ratio <= 0.95, found.text
