"""Who asks for which prefix how often: groups of synthetic prompts, on exact rates."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_poa.demand_groups import MAX_SAMPLED, PrefixDemand, PrefixGroup
from dynamo_poa.prefixes import PREFIX_TOKENS, prefix_hashes, rolled
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import Chosen

A, B = WorkerKey(2**64 - 1, 0), WorkerKey(7, 1)
BLOCK = 16


def asked(
    *blocks: int,
    worker: WorkerKey = A,
    role: Role = Role.PREFILL,
    attempt: int = 1,
    sampled: bool = True,
    prefix: tuple[int, ...] | None = None,
) -> Chosen:
    """Return the decision on a prompt of these blocks and a few tokens more."""
    told = prefix_hashes(blocks) if prefix is None else prefix
    tokens = len(blocks) * BLOCK + 3
    hashes = told if sampled else ()
    return Chosen("r", role, 0.0, 0.0, *worker, tokens, 1, attempt, (), 0, hashes)


def demand(*events: Chosen, every_s: float = 1.0, window_s: float = 60.0) -> PrefixDemand:
    """Return the demand of decisions that came at 0, every_s, ..."""
    made = PrefixDemand(window_s, BLOCK)
    for number, event in enumerate(events):
        made.add(event, number * every_s)
    return made


def test_of_a_long_prompt_as_much_is_told_as_routers_hash() -> None:
    """They stop at PREFIX_TOKENS; more depths than that are another block size's."""
    blocks = tuple(range(1, 2 * PREFIX_TOKENS // BLOCK + 1))
    whole = prefix_hashes(blocks)
    told, deeper = asked(*blocks, prefix=whole[:-1]), asked(*blocks, prefix=whole)
    (group,) = demand(told, told, deeper, deeper).groups(4.0, 10)
    assert (group.chain, group.blocks, group.rates) == (whole[-2], PREFIX_TOKENS // BLOCK, {A: 1.0})


def test_a_request_belongs_to_the_longest_prefix_that_another_has_too() -> None:
    """Two share four blocks, a third only two of them, a fourth nothing; 4 requests within 8 s."""
    found = demand(asked(1, 2, 3, 4, 5), asked(1, 2, 3, 4, 6, worker=B), asked(1, 2, 9), asked(8))
    one, two, _, four = rolled(None, [1, 2, 3, 4])
    assert one == 1
    assert found.groups(8.0, 10) == (
        PrefixGroup(four, 4, {A: 0.125, B: 0.125}, parent=two),
        PrefixGroup(two, 2, {A: 0.125}),
    )
    assert found.unshared_rate(8.0) == 0.125
    assert found.arrival_rate(8.0) == 0.5


def test_a_sampled_request_stands_for_those_that_were_not() -> None:
    """Rates are scaled by arrivals over sampled: three of twelve are told, two of them alike."""
    events = [asked(1, 2), asked(1, 2), asked(5), *[asked(1, 2, sampled=False)] * 9]
    found = demand(*events)
    (group,) = found.groups(16.0, 10)
    assert group == PrefixGroup(rolled(None, [1, 2])[1], 2, {A: 0.5})
    assert group.rate == 0.5
    assert found.unshared_rate(16.0) == 0.25
    assert found.arrival_rate(16.0) == 0.75


def test_a_request_of_a_busy_router_stands_for_more() -> None:
    """Each samples one a second, of 4 that came to the first and 40 to the second; a third tells of none."""
    found = PrefixDemand(60.0, BLOCK)
    for second in range(4):
        found.add(asked(1), float(second), "calm")
        for number in range(10):
            found.add(asked(2, sampled=not number, worker=B), float(second), "busy")
    assert [(group.chain, group.rates) for group in found.groups(8.0, 10)] == [(2, {B: 5.0}), (1, {A: 0.5})]
    for _ in range(44):
        found.add(asked(3, sampled=False), 7.0, "silent")
    assert [(group.chain, group.rates) for group in found.groups(8.0, 10)] == [(2, {B: 10.0}), (1, {A: 1.0})]
    found.add(asked(5), 7.0, "calm")
    assert found.unshared_rate(8.0) == pytest.approx(1.0 * 89 / 45 / 8)
    found.advance(68.5)
    assert found.arrival_rate(68.5) == 0.0


def test_of_more_groups_the_rarest_are_left_out() -> None:
    """Most asked for first, whoever serves them; equals in the order of their hash."""
    found = demand(
        *[asked(3)] * 2, *[asked(2), asked(2, worker=B), asked(2, worker=B)], *[asked(1)] * 2, every_s=0.5
    )
    assert [(group.chain, group.rate) for group in found.groups(10.0, 2)] == [
        (2, pytest.approx(0.3)),
        (1, pytest.approx(0.2)),
    ]
    assert [group.chain for group in found.groups(10.0, 3)] == [2, 1, 3]


def test_where_groups_part_is_told_without_requests_of_its_own() -> None:
    """Two pairs of 8 blocks share 4, a third pair 2 of those: 4 and 2 are told, 1 is no place to part."""
    deep, other, wide = (asked(1, 2, *range(start, start + 6)) for start in (3, 30, 300))
    deep, other = asked(1, 2, 3, 4, 5, 6, 7, 8), asked(1, 2, 3, 4, 50, 60, 70, 80)
    found = demand(*[deep] * 2, *[other] * 2, *[wide] * 2).groups(10.0, 10)
    two, four, eight, fifty = deep.prefix[1], deep.prefix[2], deep.prefix[3], other.prefix[3]
    parents = {group.chain: (group.blocks, group.parent, group.rate) for group in found}
    rate = pytest.approx(0.2)
    assert parents == {
        eight: (8, four, rate),
        fifty: (8, four, rate),
        wide.prefix[3]: (8, two, rate),
        four: (4, two, 0),
        two: (2, 0, 0),
    }
    assert {group.chain for group in found[3:]} == {four, two}


def test_where_kept_groups_part_keeps_the_requests_it_has() -> None:
    """Of three groups two are kept; the third, the rarest, is where those part."""
    found = demand(*[asked(1, 2)] * 2, *[asked(1, 3)] * 2, asked(1), every_s=1.0).groups(10.0, 2)
    assert [(group.blocks, group.parent, group.rate) for group in found] == [
        (2, 1, pytest.approx(0.2)),
        (2, 1, pytest.approx(0.2)),
        (1, 0, pytest.approx(0.1)),
    ]


@pytest.mark.parametrize(
    "event",
    [
        asked(1, 2, role=Role.DECODE),  # computes no prompt
        asked(1, 2, attempt=2),  # counted by its first
        asked(),  # shorter than a block
    ],
)
def test_what_has_no_demand_of_its_own_does_not_count(event: Chosen) -> None:
    """Neither as an arrival nor in a group."""
    found = demand(asked(1, 2), event, event)
    assert found.groups(4.0, 10) == ()
    assert (found.arrival_rate(4.0), found.unshared_rate(4.0)) == (0.25, 0.25)


@pytest.mark.parametrize("prefix", [(1,), (1, 2, 3), (1, 0), (0, 2)])
def test_a_prefix_that_does_not_fit_its_prompt_is_as_good_as_none(prefix: tuple[int, ...]) -> None:
    """A router of another block size; and 0 stands for blocks of unknown beginning, which caches may hold."""
    found = demand(*[asked(1, 2, prefix=prefix)] * 3, asked(4))
    assert found.groups(4.0, 10) == ()
    assert (found.arrival_rate(4.0), found.unshared_rate(4.0)) == (1.0, 1.0)


def test_requests_leave_their_groups_with_the_window() -> None:
    """The pair is one group until the first is too old; then the second shares nothing any more."""
    found = demand(asked(1, 2), asked(1, 2), asked(5), window_s=10.0)
    found.advance(10.0)
    assert [group.rate for group in found.groups(10.0, 10)] == [pytest.approx(0.2)]
    found.advance(10.5)
    assert found.groups(10.5, 10) == ()
    assert found.unshared_rate(10.5) == pytest.approx(0.2)
    found.advance(100.0)
    assert (found.groups(100.0, 10), found.unshared_rate(100.0), found.arrival_rate(100.0)) == ((), 0, 0)


def test_at_the_first_instant_there_is_no_rate() -> None:
    """Requests over no time at all are no figure, and no division by zero."""
    found = PrefixDemand(60.0, BLOCK)
    assert (found.groups(5.0, 10), found.unshared_rate(5.0), found.arrival_rate(5.0)) == ((), 0.0, 0.0)
    found.add(asked(1), 5.0)
    found.add(asked(1), 5.0)
    assert (found.arrival_rate(5.0), found.groups(5.0, 10)[0].rates) == (0.0, {A: 0.0})


def test_more_prompts_than_are_remembered_keep_their_rates() -> None:
    """A flood of 1.5 times the bound: the oldest are let go, the rates still add up to the arrivals."""
    count = MAX_SAMPLED * 3 // 2
    found = PrefixDemand(60.0, BLOCK)
    for number in range(count):
        found.add(asked(1 if number < MAX_SAMPLED // 2 else 2 + number % 2), number / count * 30.0)
    assert {group.chain: group.rate for group in found.groups(30.0, 10)} == {
        2: pytest.approx(count / 60),
        3: pytest.approx(count / 60),
    }
    assert found.arrival_rate(30.0) == pytest.approx(count / 30)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.sampled_from([A, B]), st.booleans()),
    max_size=25,
)


@given(PROMPTS, st.integers(1, 20))
def test_rates_add_up_and_groups_are_what_a_search_over_all_pairs_finds(
    prompts: list[tuple[list[int], WorkerKey, bool]], window_s: int
) -> None:
    """Whatever came and went: the window's groups by definition, and no request in two of them."""
    found = PrefixDemand(float(window_s), BLOCK)
    for number, (blocks, worker, sampled) in enumerate(prompts):
        found.add(asked(*blocks, worker=worker, sampled=sampled), float(number))
    now_s = float(len(prompts))
    found.advance(now_s)
    kept = [
        (prefix_hashes(blocks), worker)
        for number, (blocks, worker, sampled) in enumerate(prompts)
        if sampled and now_s - number <= window_s
    ]
    expected: dict[tuple[int, int], int] = {}
    for place, (prefix, _) in enumerate(kept):
        others = {chain for other, (chains, _) in enumerate(kept) if other != place for chain in chains}
        shared = [index for index, chain in enumerate(prefix) if chain in others]
        if shared:
            key = (prefix[shared[-1]], 2 ** shared[-1])
            expected[key] = expected.get(key, 0) + 1
    arrivals = sum(now_s - number <= window_s for number in range(len(prompts)))
    each = arrivals / min(now_s, window_s) / len(kept) if kept else 0.0
    groups = found.groups(now_s, 100)
    assert {(group.chain, group.blocks): group.rate for group in groups if group.rates} == {
        key: pytest.approx(count * each) for key, count in expected.items()
    }
    begins = {prefix[depth - 1]: prefix[:depth] for prefix, _ in kept for depth in range(1, len(prefix) + 1)}
    told = {group.chain for group in groups}
    for group in groups:
        assert group.parent == next((chain for chain in begins[group.chain][-2::-1] if chain in told), 0)
    for one, other in itertools.combinations(told, 2):
        both = [a for a, b in zip(begins[one], begins[other], strict=False) if a == b]
        assert not both or both[-1] in told
    if kept:
        total = sum(group.rate for group in groups) + found.unshared_rate(now_s)
        assert total == pytest.approx(found.arrival_rate(now_s))
