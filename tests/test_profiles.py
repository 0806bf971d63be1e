"""The timing profiles: what is in the files, and that the simulator takes them."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynamo_poa.bench.suites import profiles, replayed
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Poisson
from dynamo_poa.workloads.synthetic import Paper


def test_the_papers_two_models_are_there_each_with_its_source():
    """Issue 5: B200-like 70B TP4 and 340B TP8 workers, as small data files with their source."""
    shown = {
        name: (profiles.about(name).model, profiles.about(name).tensor_parallel) for name in profiles.names()
    }
    assert shown == {
        "b200-llama-70b-tp4": ("Llama-3.1-70B", 4),
        "b200-nemotron-340b-tp8": ("Nemotron-4-340B", 8),
    }
    for name in profiles.names():
        assert "aiconfigurator-core 0.12.0" in profiles.about(name).source
        assert profiles.path_of(name).stat().st_size < 20_000


@pytest.mark.parametrize("name", profiles.names())
def test_more_work_hardly_ever_takes_less_time(name: str):
    """No step falls by more than 6 %: so uneven is the database itself where kernels change."""
    with np.load(profiles.path_of(name)) as tables:
        for grid in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
            assert np.all(np.diff(tables[grid]) > 0)
        prefill_ms, steps_ms = tables["prefill_ttft_ms"], tables["decode_itl"]
        assert np.all(np.diff(prefill_ms) / prefill_ms[1:] > -0.06)
        assert np.all(np.diff(steps_ms, axis=0) / steps_ms[1:] > -0.06)


@pytest.mark.parametrize("name", profiles.names())
def test_a_lone_request_takes_what_the_tables_say(name: str):
    """TTFT = prefill of the prompt + one decode step: the first token comes with the step after."""
    fleet = Fleet(name="one", prefill=0, decode=1, profile=name)
    cell = Cell(
        suite="test",
        engine="replay",
        fleet=fleet,
        content=Paper(input_tokens=1024, output_tokens=2),
        load=Poisson(rate_rps=0.01),
        policy=Policy(name="round-robin", router_mode="round-robin"),
        seed=1,
        requests=1,
    )
    figures = replayed.run(cell).figures
    with np.load(profiles.path_of(name)) as tables:
        prefill_ms = np.interp(1024, tables["prefill_isl"], tables["prefill_ttft_ms"])
        step_ms = tables["decode_itl"][0, 0]
    assert figures["ttft_mean_s"] == pytest.approx((prefill_ms + step_ms) / 1000, rel=0.02)
    assert figures["itl_mean_s"] == pytest.approx(step_ms / 1000, rel=0.05)


def test_an_unknown_profile_is_refused_with_those_there_are():
    """A name that is none is not taken for the engine's own timing."""
    with pytest.raises(
        ConfigError, match=r"profile = 'h100': must be a path or one of b200-llama-70b-tp4, b200-nem"
    ):
        profiles.path_of("h100")


def test_a_folder_of_the_profilers_results_is_a_profile(tmp_path: Path):
    """`--profile DIR`; worked: prefill 5 + 0.1 n ms, steps 8 + 0.02 requests + KV tokens / 100,000 ms."""
    tokens = [100, 1000, 4000]
    prefill = {"prefill_isl": tokens, "prefill_ttft": [5 + 0.1 * n for n in tokens]}
    (tmp_path / "prefill_raw_data.json").write_text(json.dumps(prefill))
    points = [(share, context) for share in (0.1, 0.5, 1.0) for context in (500, 2000, 4000)]
    steps_ms = [8 + 0.02 * round(share * 1e6 / context) + share * 10 for share, context in points]
    decode = {
        "x_kv_usage": [share for share, _ in points],
        "y_context_length": [context for _, context in points],
        "z_itl": steps_ms,
        "max_kv_tokens": 1_000_000,
    }
    (tmp_path / "decode_raw_data.json").write_text(json.dumps(decode))
    path = profiles.path_of(str(tmp_path))
    with np.load(path) as tables:
        at_2000 = np.interp(2000, tables["prefill_isl"], tables["prefill_ttft_ms"])
        assert at_2000 == pytest.approx(205, rel=1e-6)
        assert tables["decode_itl"][-1, -1] == pytest.approx(8 + 0.02 * 250 + 10, rel=1e-6)
    assert profiles.path_of(str(tmp_path)) == path


def test_a_folder_without_results_is_refused(tmp_path: Path):
    """What is missing, by name."""
    with pytest.raises(
        ConfigError, match=r"must hold selected_prefill_interpolation/raw_data\.npz or prefill_raw"
    ):
        profiles.path_of(str(tmp_path))
    (tmp_path / "prefill_raw_data.json").write_text("{}")
    (tmp_path / "decode_raw_data.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the profiler's results: 'prefill_isl'"):
        profiles.path_of(str(tmp_path))
