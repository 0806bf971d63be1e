"""The residency benchmark: its caches say what engines would, and a run finds what is there."""

from dynamo_poa.bench.residency import MB, PROMPT_BLOCKS, Cache, Found, Run, figure, run
from dynamo_poa.values import WorkerKey


def test_the_made_up_caches_evict_the_oldest_and_are_mirrored_exactly() -> None:
    """Invariant: nothing is refused, and every mirror holds what its cache does."""
    world = Run(3 * 64 * PROMPT_BLOCKS, ranks=3)
    each = world.caches[0].capacity_blocks
    turns = list(world.turns(each))
    assert (each, sum(events for events, _ in turns)) == (1024, 3 * 1024)
    assert sum(events for events, _ in world.turns(512)) == 3 * 2 * 512
    for cache in world.caches:
        held = {cache.name(number) for number in range(cache.first, cache.end)}
        assert (len(held), cache.first) == (1024, 512)
        assert world.fleet.resident_blocks(WorkerKey(cache.worker, 0)) == held
    assert {(snapshot.evicted, len(snapshot.chains)) for _, snapshot in world.fleet.caches()} == {(512, 1024)}
    assert {state.cache.approximate for state in world.fleet.workers(0.0)} == {False}
    assert dict(world.fleet.dropped) == {}


def test_a_run_counts_what_it_holds() -> None:
    """Rates are of block events, not of messages or of prompts."""
    found = run(4 * 2048, ranks=4)
    assert found.blocks == 4 * 2048
    assert found.slowest_per_s <= found.churn_per_s
    assert min(found.after_bytes, found.before_bytes) > 0  # of so few blocks the process may even shrink


def test_the_figure_is_judged_against_memory_speed_and_the_time_of_a_look() -> None:
    """Goals of the issue: 2 GB and 200 B a block, 100,000 block events a second, 5 ms."""
    found = Found(
        blocks=10_000_000,
        before_bytes=100_000_000,
        after_bytes=2_100_000_000,
        fill_per_s=1.0,
        churn_per_s=100_000.0,
        slowest_per_s=90_000.0,
        single_per_s=50_000.0,
        longest_ms=80.0,
        look_ms=5.1,
        arrays_ms=90.0,
    )
    judged = {measure.key: (measure.value, measure.reached) for measure in figure(found).measures}
    assert judged["rss_mb"] == (2_100_000_000 / MB, False)
    assert judged["bytes_per_block"] == (200.0, True)
    assert judged["per_s"] == (100_000.0, True)
    assert judged["look_ms"] == (5.1, False)
    assert judged["single_per_s"] == (50_000.0, None)


def test_what_a_block_is_called_follows_from_its_number_and_rank() -> None:
    """No two blocks of a fleet share a hash, so that no rank's mirror is smaller than its cache."""
    names = {Cache(worker, 64).name(number) for worker in (1, 2, 64) for number in range(1000)}
    assert len(names) == 3000
    assert max(names) > 2**63
