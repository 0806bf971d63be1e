"""What the benchmark of splits makes of its times, and that it times what it says."""

from dynamo_poa.bench.splits import GOAL_MS, SLO, WORKERS, figure, loads, measure
from dynamo_poa.games.allocation import Pool, PoolLimits, Pools, every_split
from dynamo_poa.values import Curve


def test_the_figure_is_the_median_of_each_load_against_the_goal() -> None:
    """Goals: every split of 64 workers in 50 ms."""
    assert (WORKERS, GOAL_MS) == (64, 50.0)
    made = figure({"light": [10.0, 20.0, 30.0], "over capacity": [60.0] * 3})
    assert [(one.key, round(one.value), one.reached) for one in made.measures] == [
        ("light_ms", 20, True),
        ("light_p99_ms", 20, None),
        ("over_capacity_ms", 60, False),
        ("over_capacity_p99_ms", 60, None),
    ]


def test_every_load_is_timed_and_one_is_more_than_any_split_gets_done() -> None:
    """A row and a P99 for each of four loads; the heaviest open one has no split with all in time."""
    told: list[str] = []
    assert [one.key for one in measure(1, told.append).measures][::2] == [
        "light_ms",
        "heavy_ms",
        "over_capacity_ms",
        "closed_ms",
    ]
    assert len(told) == 4
    curve = Curve(prefill_base_s=0.016, prefill_token_s=1.7e-5, decode_base_s=0.006, decode_kv_token_s=1.6e-7)
    pool = Pool(curve=curve, limits=PoolLimits(max_num_seqs=256, kv_tokens=262_144))
    pools = Pools(prefill=pool, decode=pool)
    best = {
        name: max(min(one.ttft_frac, one.itl_frac) for one in every_split(mix, pools, SLO, WORKERS))
        for name, mix in loads().items()
    }
    assert best["light"] > 0.99
    assert best["over capacity"] < 0.1
