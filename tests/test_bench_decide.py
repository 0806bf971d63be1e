"""What the benchmark of decisions makes of its times, and that it times what it says."""

import asyncio

from dynamo_poa.bench.decide import GOALS_US, KINDS, Kind, _decide, _hash, figure
from dynamo_poa.values import Role, Selection


def test_the_figure_is_what_marginal_cost_adds_in_pairs_of_batches() -> None:
    """Goals: <= 150 us at 16 workers, <= 400 us at 128."""
    assert GOALS_US == {16: 150.0, 128: 400.0}
    times = {Selection.KV: [50e-6] * 10, Selection.MARGINAL: [(150 + 10 * n) * 1e-6 for n in range(10)]}
    made = figure({Kind(Role.DECODE, 16): times, Kind(Role.PREFILL, 128): times}, [200e-6, 90e-6, 100e-6])
    assert [(measure.key, round(measure.value), measure.reached) for measure in made.measures] == [
        ("decode_16_added_us", 145, True),
        ("decode_16_added_p90_us", 180, None),
        ("prefill_128_added_us", 145, True),
        ("prefill_128_added_p90_us", 180, None),
        ("prefix_us", 100, None),
    ]


def test_every_leg_is_timed_at_both_sizes_under_either_selection() -> None:
    """A batch of each in turns; all decisions by marginal cost are picks, else nothing is reported."""
    assert {(kind.role, kind.workers) for kind in KINDS} == {(role, n) for role in Role for n in (16, 128)}
    spent = asyncio.run(_decide(Kind(Role.AGGREGATED, 16), 2))
    assert {selection: len(times) for selection, times in spent.items()} == dict.fromkeys(Selection, 2)
    assert all(taken_s > 0 for times in spent.values() for taken_s in times)


def test_what_is_timed_of_a_prompt_is_the_hashing_of_all_its_prefixes() -> None:
    """Prompts that were not hashed to every depth would be no measurement: nine of 4,096 tokens."""
    spent = _hash(2)
    assert len(spent) == 2
    assert min(spent) > 0
