"""Policies by name, and how the best setting is found without measuring it on what it was chosen by."""

import msgspec
import pytest
from suite_results import FLEET, cell, done

from dynamo_poa.bench.suites import baselines
from dynamo_poa.bench.suites.baselines import BEST, DEFAULT, TUNING_SEEDS
from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Policy, Result, SlowWorker, Stall
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Closed
from dynamo_poa.workloads.synthetic import Trace


def best_cell(seed: int = 1, users: int = 8, **rest: object) -> Cell:
    return msgspec.structs.replace(cell(seed=seed, load=Closed(users=users)), policy=BEST, **rest)


def tuned(cells: tuple[Cell, ...], values: dict[str, float]) -> list[Result]:
    """Results of tuning cells: by the setting's name, else 9."""
    return [done(one, ttft_mean_s=values.get(one.policy.name, 9.0)) for one in cells]


def test_the_policies_are_those_of_the_issue_and_each_engine_offers_its_own() -> None:
    """Issue: baselines in each suite; the simulator has no power-of-two, least-loaded and no plugin."""
    assert [policy.name for policy in baselines.LIVE] == [
        "round-robin",
        "random",
        "power-of-two",
        "least-loaded",
        "kv",
        "kv decay",
        "kv best",
        "ours off",
        "ours shadow",
        "ours active",
        "ours auto",
        "ours marginal",
    ]
    assert {policy.name: policy.table for policy in baselines.LIVE if policy.plugin == "active"} == {
        "ours active": "table",
        "ours auto": "auto",
        "ours marginal": "marginal",
    }
    assert set(baselines.JUDGED) <= {policy.name for policy in baselines.LIVE}
    assert [policy.name for policy in baselines.REPLAY] == [
        "round-robin",
        "random",
        "kv",
        "kv decay",
        "kv best",
    ]
    assert Policy(name="kv") == DEFAULT


def test_an_unknown_policy_is_refused_with_the_list() -> None:
    """Issue, bad input: an unknown baseline (the list)."""
    with pytest.raises(
        ConfigError, match="policy 'fastest': must be one of round-robin, random, power-of-two"
    ):
        baselines.policy("fastest")


def test_the_settings_tried_begin_with_the_defaults_and_can_all_be_served_by_the_plugin_too() -> None:
    """9 of τ and ω, 3 with more weight on prefill; each once, under a name of its own."""
    settings = baselines.settings()
    assert settings[0] == DEFAULT
    assert len(settings) == len({policy.name for policy in settings}) == 12
    assert all(1 in (policy.overlap_credit, policy.prefill_load_scale) for policy in settings)


def test_tuning_replays_each_workload_once_whatever_the_seeds_it_is_measured_on() -> None:
    """12 settings on 2 seeds of their own, for two loads; policies but `kv best` need none."""
    cells = [best_cell(seed, users) for seed in (1, 2, 3) for users in (8, 16)] + [cell()]
    found = baselines.tuning_cells(cells)
    assert len(found) == 12 * 2 * 2
    assert {one.seed for one in found} == set(TUNING_SEEDS)
    assert {one.suite for one in found} == {"test-tuning"}
    assert not {one.seed for one in cells} & set(TUNING_SEEDS)


def test_a_live_fleet_is_tuned_by_replay_of_what_of_it_can_be_replayed() -> None:
    """Slow and stalled workers and further routers are left out, speed and caches kept."""
    odd = msgspec.structs.replace(
        FLEET,
        name="odd",
        slow=(SlowWorker(role="decode", number=0, factor=3.0),),
        stall=Stall(role="decode", number=0, stall_s=2.0, period_s=6.0),
        routers=2,
        replica_sync=True,
        speedup=0.5,
        kv_blocks=640,
    )
    phases = (Phase(name="a", load=Closed(users=8), seconds=9.0),)
    length = {"learn_s": 8.0, "warm_up_s": 2.0, "seconds": 4.0}
    live = best_cell(engine="live", fleet=odd, requests=0, phases=phases, **length)
    (first, *_) = baselines.tuning_cells([live])
    assert first == Cell(
        suite="test-tuning",
        engine="replay",
        fleet=Fleet(name="2P/4D", prefill=2, decode=4, speedup=0.5, kv_blocks=640),
        content=live.content,
        load=live.load,
        policy=DEFAULT,
        seed=TUNING_SEEDS[0],
        requests=1000,
    )


def test_the_best_setting_of_each_workload_takes_the_place_of_its_cells_alone() -> None:
    """At 8 users one setting wins, at 16 another; both are called `kv best`, other policies stay."""
    cells = [best_cell(1, 8), best_cell(2, 8), best_cell(1, 16), cell()]
    tuning = baselines.tuning_cells(cells)
    few = tuple(one for one in tuning if one.load == Closed(users=8))
    many = tuple(one for one in tuning if one.load == Closed(users=16))
    results = tuned(few, {"kv": 0.5, "kv τ=0.3 ω=0.5": 0.4}) + tuned(many, {"kv τ=0 ω=1 scale=4": 0.1})
    found = baselines.settled(cells, results)
    at_few = Policy(name="kv best", router_temperature=0.3, overlap_credit=0.5)
    at_many = Policy(name="kv best", prefill_load_scale=4.0)
    assert [one.policy for one in found] == [at_few, at_few, at_many, cell().policy]
    assert [one.seed for one in found] == [1, 2, 1, 1]


def test_a_trace_is_tuned_on_its_first_half_and_measured_on_its_second() -> None:
    """Found in review: all seeds of a trace ask the same, so other seeds were the same requests again."""
    second = Trace(path="t.jsonl", part="second", limit=2000)
    (first, *_) = baselines.tuning_cells([best_cell(content=second)])
    assert first.content == Trace(path="t.jsonl", part="first", limit=2000)
    results = tuned(baselines.tuning_cells([best_cell(content=second)]), {"kv τ=0.3 ω=1": 0.1})
    (found,) = baselines.settled([best_cell(content=second)], results)
    assert (found.content, found.policy.router_temperature) == (second, 0.3)
    with pytest.raises(ConfigError, match="part = 'all': must be 'second' with kv best"):
        baselines.tuning_cells([best_cell(content=Trace(path="t.jsonl"))])


def test_of_equal_settings_the_defaults_are_left_alone() -> None:
    """Nothing beats them, so nothing is changed."""
    (found,) = baselines.settled([best_cell()], tuned(baselines.tuning_cells([best_cell()]), {}))
    assert found.policy == Policy(name="kv best")


def test_a_setting_that_lacks_a_seed_cannot_win_and_without_any_there_is_no_best() -> None:
    """One lucky seed is no evidence."""
    tuning = baselines.tuning_cells([best_cell()])
    lucky = [one for one in tuning if one.policy.name == "kv τ=0.7 ω=1"]
    results = tuned(tuning, {"kv τ=0.7 ω=1": 0.1, "kv τ=0.3 ω=1": 0.2})
    results = [result for result in results if result.cell.id != lucky[0].id]
    (found,) = baselines.settled([best_cell()], results)
    assert found.policy.router_temperature == 0.3
    assert baselines.settled([best_cell()], []) == (best_cell(),)
