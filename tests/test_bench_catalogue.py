"""Suites: what each consists of, that its engine can run it, words that choose, how long it takes."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from dynamo_poa.bench.suites import baselines, profiles, replayed, runner, variants
from dynamo_poa.bench.suites.catalogue import SUITES, Options, chosen, estimated_s, suite
from dynamo_poa.bench.suites.cells import Cell
from dynamo_poa.bench.suites.live import first_phase
from dynamo_poa.bench.suites.live_graphs import plan_of, watches, watches_of
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Closed
from dynamo_poa.workloads.stream import MAX_PHASE, requests

ALL = tuple(SUITES)


@pytest.fixture(scope="module")
def cells() -> dict[str, tuple[Cell, ...]]:
    return {name: SUITES[name].cells(Options()) for name in ALL}


def slots(cells: tuple[Cell, ...], engine: str) -> Iterator[tuple[Cell, ...]]:
    """Cells that differ in their policy alone."""
    of_engine = sorted((one for one in cells if one.engine == engine), key=lambda one: (one.group, one.seed))
    for _, members in groupby(of_engine, key=lambda one: (one.fleet, one.group, one.seed)):
        yield tuple(members)


def test_the_suites_are_those_of_the_issue() -> None:
    """And one for live graphs under every workload, the splits of 8 alone, which have a budget, two games."""
    assert set(ALL) == {
        *("paper-1", "paper-2", "paper-3", "paper-4"),
        *("splits", "splits-8", "hetero", "workloads", "workloads-live", "caching", "allocation", "smoke"),
    }


def test_an_unknown_suite_is_refused_with_the_list() -> None:
    """Issue, bad input."""
    with pytest.raises(ConfigError, match="suite 'paper-5': must be one of paper-1, paper-2"):
        suite("paper-5")


@pytest.mark.parametrize("name", ALL)
def test_every_cell_is_there_once_and_can_be_run_by_its_engine(
    cells: dict[str, tuple[Cell, ...]], name: str
) -> None:
    """The simulator takes each replay, tuning too; each live fleet and policy makes a plan; streams begin."""
    ours = cells[name]
    assert len({one.id for one in ours}) == len(ours)
    assert {one.suite for one in ours} == {name}
    for one in (*ours, *baselines.tuning_cells(ours)):
        if one.engine == "replay":
            replayed.check(one)
    for fleet, policy in {(one.fleet, one.policy) for one in ours if one.engine == "live"}:
        plan_of(fleet, policy, 10.0)
    for content, load in {(one.content, one.load) for one in ours}:
        assert next(iter(requests(content, load, 1, 16))).input_tokens >= 1


@pytest.mark.parametrize(
    "name", sorted(set(ALL) - {"smoke", "hetero", "splits", "splits-8", "paper-4", "caching", "allocation"})
)
def test_each_workload_meets_every_policy_its_engine_offers(
    cells: dict[str, tuple[Cell, ...]], name: str
) -> None:
    """Issue: baselines in each, at 3 seeds."""
    for engine, offered in (("replay", baselines.REPLAY), ("live", baselines.LIVE)):
        for slot in slots(cells[name], engine):
            assert {one.policy for one in slot} == set(offered)
    assert {one.seed for one in cells[name]} == {1, 2, 3}


def test_caching_is_three_static_weights_whose_demand_is_of_the_cell_alone(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """Issue 7; the last look counts demand as long ago as is measured, and looks before it as long again."""
    ours = cells["caching"]
    assert [(one.policy.overlap_credit, one.policy.plugin) for one in ours[:3]] == [
        (1.0, "off"),
        (0.5, "off"),
        (0.0, "off"),
    ]
    assert {one.seed for one in ours} == {1, 2, 3}
    assert all(one.warm_up_s == one.seconds for one in ours)
    plan = plan_of(ours[0].fleet, ours[0].policy, ours[0].seconds)
    assert plan.sections["PoaController"].caching.demand_window_s == ours[0].seconds


def test_paper_4_is_sixteen_settings_at_two_loads_and_the_baselines(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """The grid holds the paper's three regimes; Dynamo's default is one of the sixteen and there once."""
    found = list(slots(cells["paper-4"], "replay"))
    assert len(found) == 2 * 2 * 3
    for slot in found:
        settings = {
            (p.router_temperature, p.overlap_credit) for one in slot if (p := one.policy).router_mode == "kv"
        }
        assert len(settings - {(-1.0, 1.0)}) == 16  # which stands for the best
        assert {(0.0, 1.0), (0.7, 1.0), (0.8, 0.1)} <= settings
        assert len(slot) == 16 + 4
    assert {one.fleet.topology for one in cells["paper-4"]} == {"1P/5D", "1P/2D"}


def test_splits_are_all_of_six_and_of_eight_workers(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Every split with a worker of each kind, and as many that do both."""
    assert {one.fleet.topology for one in cells["splits"]} == {
        *(f"{prefill}P/{6 - prefill}D" for prefill in range(1, 6)),
        *(f"{prefill}P/{8 - prefill}D" for prefill in range(1, 8)),
        *("6A", "8A"),
    }
    assert {one.fleet.prefill + one.fleet.decode for one in cells["splits-8"]} == {8}
    heavy = [one for one in cells["splits"] if one.load == Closed(users=256)]
    assert {one.policy for one in heavy} == set(baselines.REPLAY)


def test_hetero_has_every_variant_of_the_issue(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Equal, 3x, 5x, stalls, 2 and 4 routers with and without synchronisation, small caches, a host tier."""
    fleets = {one.fleet.name: one.fleet for one in cells["hetero"]}
    slow = [(fleet.topology, one.role, one.factor) for fleet in fleets.values() for one in fleet.slow]
    assert slow == [("2P/4D", "decode", 3.0), ("5A", "aggregated", 5.0), ("2P/5D", "decode", 5.0)]
    stalls = [fleet.stall for fleet in fleets.values() if fleet.stall]
    assert [(stall.stall_s, stall.period_s) for stall in stalls] == [(2.0, 6.0)]
    assert sorted((fleet.routers, fleet.replica_sync) for fleet in fleets.values() if fleet.routers > 1) == [
        (2, False),
        (2, True),
        (4, False),
        (4, True),
    ]
    assert {(fleet.kv_blocks, fleet.host_blocks) for fleet in fleets.values()} == {
        (4096, 0),
        (640, 0),
        (640, 4096),
    }
    assert len(fleets) == 14
    equal = next(slot for slot in slots(cells["hetero"], "live") if slot[0].fleet.name == "equal")
    assert {one.policy for one in equal} == set(baselines.LIVE)


def test_policies_to_be_left_on_stand_beside_the_default_in_every_variant(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """Issue 6: never worse in any; the paper's table beside them where a row of the verdict asks for more."""
    without_auto = set[str]()
    for slot in slots(cells["hetero"], "live"):
        names = {one.policy.name for one in slot}
        if slot[0].fleet.name == variants.WITHOUT_SLOW:  # a bound, not a variant
            assert names == {"kv"}
            continue
        assert {"kv", "ours marginal"} <= names
        if "ours auto" not in names:
            without_auto.add(slot[0].fleet.name)
        if slot[0].learn_s or slot[0].fleet.name in ("equal", "4 routers"):
            assert set(baselines.JUDGED) <= names
    assert without_auto == {"2 routers synchronised", "4 routers synchronised"}


def test_workers_differ_or_a_resource_binds_only_after_time_to_learn(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """Issue 6: learned within 60 s of load, the same for all policies; then a loop gets into its stride."""
    learning = {one.fleet.name: one.learn_s + one.warm_up_s for one in cells["hetero"] if one.learn_s}
    assert learning == {
        "one of five aggregated workers 5x slower": 8.0,
        "one of five decode workers 5x slower": 16.0,
        "the other four decode workers alone": 8.0,
        "one decode worker stalls 2 s in 6": 16.0,
        "prefill-bound": 32.0,
        "decode-bound": 32.0,
    }


def test_what_is_judged_is_affordable(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Issue 6, half an hour: four policies, three seeds, every variant; what it takes is measured."""
    judged = chosen(cells["hetero"], baselines.JUDGED)
    assert {one.fleet for one in judged} == {one.fleet for one in cells["hetero"]}
    assert estimated_s(judged) <= 32 * 60


def test_a_graph_learns_once(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Four graphs of three cells each: 10 s a cell with its drain, 30 s and the start a graph."""
    judged = chosen(cells["hetero"], [*baselines.JUDGED, "prefill-bound"])
    assert len(judged) == 12
    assert estimated_s(judged) == 12 * (2 + 6 + 2) + 4 * (4 + 30)


def test_the_graphs_that_are_up_at_once_fit_into_the_kernels_usual_inotify_limit(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """128 for each user on most systems: a graph beyond it would never see its workers."""
    live = [one for name in ("hetero", "paper-1", "workloads-live") for one in cells[name] if one.seed == 1]
    parts = runner.blocks(live)
    assert sum(map(len, parts)) == len(live)
    for part in parts:
        plans = {one.policy.name: plan_of(one.fleet, one.policy, 20.0) for one in part}
        assert sum(map(watches, plans.values())) <= 128
        assert [watches(plans[one.policy.name]) for one in part] == [
            watches_of(one.fleet, one.policy) for one in part
        ]


def test_the_default_is_up_with_the_policies_that_are_judged(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Pairs of them are interleaved; of four routers not even so many graphs have room at once."""
    judged = chosen(cells["hetero"], baselines.JUDGED)
    up = {part[0].fleet.name: set[str]() for part in runner.blocks(judged)}
    for part in runner.blocks(judged):
        if any(one.policy.name == "kv" for one in part):
            up[part[0].fleet.name] = {one.policy.name for one in part}
    assert up.pop("4 routers") == {"kv", "ours auto", "ours marginal"}
    of_fleet = {name: {one.policy.name for one in judged if one.fleet.name == name} for name in up}
    assert up == of_fleet


def test_a_stalling_worker_is_measured_over_whole_periods(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Else the share of the time it stands still would be chance."""
    stalling = [one for one in cells["hetero"] if one.fleet.stall is not None]
    assert {(one.seconds, one.learn_s > 12.0) for one in stalling} == {(12.0, True)}  # some stalls before


@pytest.mark.parametrize("name", ALL)
def test_a_seeds_loads_ask_nothing_that_another_has_asked_on_graphs_that_live_on(
    cells: dict[str, tuple[Cell, ...]], name: str
) -> None:
    """Found in review: numbered as they came, they were others after a resume, and pairs were none."""
    live = [one for one in cells[name] if one.engine == "live"]
    courses = {(one.fleet, one.content, one.load, one.phases) for one in live}
    numbers = {(one.fleet, first_phase(one)) for one in live}
    assert len(numbers) == len(courses)
    assert all(first_phase(one) + len(one.phases) <= MAX_PHASE for one in live)


@pytest.mark.parametrize(
    ("name", "minutes"), [("paper-4", 5), ("splits-8", 3), ("hetero", 40), ("caching", 6), ("smoke", 3)]
)
def test_suites_with_a_budget_are_estimated_to_keep_it(
    cells: dict[str, tuple[Cell, ...]], name: str, minutes: float
) -> None:
    """Issue, figures: the estimate that `bench list` shows; what they take is measured by running them."""
    assert estimated_s(cells[name]) <= minutes * 60


def test_words_choose_cells_of_one_kind_together_and_narrow_across_kinds(
    cells: dict[str, tuple[Cell, ...]],
) -> None:
    """Two policies on one fleet under one load."""
    found = chosen(cells["paper-1"], ["kv", "ours active", "1P/5D", "96 users"])
    assert {(one.policy.name, one.fleet.name, one.load.text) for one in found} == {
        ("kv", "1P/5D", "96 users"),
        ("ours active", "1P/5D", "96 users"),
    }
    assert len(found) == 2 * 3
    assert chosen(cells["paper-1"], []) == cells["paper-1"]


def test_words_that_no_cell_is_at_once_are_refused(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Else a run of nothing would end well."""
    with pytest.raises(ConfigError) as caught:
        chosen(cells["smoke"], ["ours active", "2P/4D"])
    assert caught.value.problems == (
        "--only: no cell of this suite is of all these at once: policies: ours active; fleets: 2P/4D",
    )


def test_an_unknown_word_is_refused_with_what_there_is(cells: dict[str, tuple[Cell, ...]]) -> None:
    """Every unknown one, with this suite's policies, fleets, workloads and loads."""
    with pytest.raises(ConfigError) as caught:
        chosen(cells["paper-2"], ["kv", "kw", "3P/1D"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "--only 'kw'",
        "--only '3P/1D'",
    ]
    assert (
        "policies: round-robin, random, power-of-two, least-loaded, kv, kv decay" in caught.value.problems[0]
    )
    assert "fleets: 1P/5D; workloads: paper; loads: 256 users" in caught.value.problems[0]


def test_names_that_words_choose_by_have_no_comma(cells: dict[str, tuple[Cell, ...]]) -> None:
    """`--only` is a list with commas."""
    for one in (one for members in cells.values() for one in members):
        assert "," not in one.fleet.name
        assert "," not in one.policy.name
    bursts = chosen(cells["workloads"], ["250 requests/s for 5 s", "kv"])
    assert {one.load.text for one in bursts} == {"250 requests/s for 5 s, 40 for 10 s"}


def test_a_model_is_another_timing_with_its_own_cache_but_where_the_suite_is_about_small_ones() -> None:
    """Issue: the paper's two models are suite options. An unknown one is refused with the list."""
    name = profiles.names()[0]
    for one in SUITES["paper-4"].cells(Options(model=name)):
        assert (one.fleet.profile, one.fleet.kv_blocks) == (name, profiles.about(name).kv_blocks)
        assert one.fleet.name == f"{one.fleet.topology} on {name}"
    small = [one for one in SUITES["hetero"].cells(Options(model=name)) if "small" in one.fleet.name]
    assert {one.fleet.kv_blocks for one in small} == {640}
    with pytest.raises(ConfigError, match=f"--model 'gpt': must be one of .*{name}"):
        SUITES["paper-4"].cells(Options(model="gpt"))


def test_a_trace_of_ones_own_joins_the_workloads(tmp_path: Path) -> None:
    """Without the option there is none: traces are not part of the package."""
    with pytest.raises(ConfigError, match="--trace 'nowhere': must be a file"):
        SUITES["workloads"].cells(Options(trace="nowhere"))
    trace = tmp_path / "mine.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    names = {one.content.name for one in SUITES["workloads"].cells(Options(trace=str(trace)))}
    assert "trace mine, second half, 2000 requests" in names
    assert not any("trace" in one.content.name for one in SUITES["workloads"].cells(Options()))


def test_seeds_are_those_that_were_asked_for() -> None:
    """Their number is an option."""
    assert {one.seed for one in SUITES["paper-4"].cells(Options(seeds=(1, 2, 3, 4, 5)))} == {1, 2, 3, 4, 5}
