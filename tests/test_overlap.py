"""When the caches tell workers apart, and what share of the prompts they hold."""

import pytest

from dynamo_poa.overlap import MIN_RECORDED, OverlapWindow
from dynamo_poa.values import CacheSignal, CacheView, Candidate, Role
from dynamo_poa.wire import Chosen


def chosen(
    *uncached_tokens: int, prompt_tokens: int = 768, cached_tokens: int = 0, role: Role = Role.PREFILL
) -> Chosen:
    """Return a decision whose workers would have to compute so many tokens; none: not recorded."""
    candidates = tuple(
        Candidate(worker, 0, tokens, 0, 0, 0) for worker, tokens in enumerate(uncached_tokens, 1)
    )
    return Chosen("r", role, 0.0, 0.0, 1, 0, prompt_tokens, 1, 1, candidates, cached_tokens)


def view_of(*events: Chosen, window: int = 256) -> CacheView:
    overlaps = OverlapWindow(window, block_size=16)
    for event in events:
        overlaps.add(event, 0.0)
    return overlaps.view()


def test_workers_that_differ_are_a_signal_and_hits_have_a_share() -> None:
    """Case E6: half of the decisions find 576 of 768 tokens on one worker; a quarter of all tokens hit."""
    hit, miss = chosen(192, 768, cached_tokens=576), chosen(768, 768)
    view = view_of(*[hit, miss, miss] * 64)
    assert view == CacheView(signal=CacheSignal.PRESENT, hit_frac=0.25)


def test_prompts_that_no_worker_holds_are_an_absent_signal_and_an_unknown_hit_share() -> None:
    """Cases E6 (b), (d): short prompts or no prefix cache: nothing ever hits, which is not a share of 0."""
    assert view_of(*[chosen(10, 10, prompt_tokens=10)] * MIN_RECORDED) == CacheView(
        signal=CacheSignal.ABSENT, hit_frac=None
    )


def test_differences_where_nothing_is_ever_found_cached_are_no_signal() -> None:
    """Case E6 (d), measured: loads without and with the prompt are two answers, and others come between."""
    assert view_of(*[chosen(768, 192)] * MIN_RECORDED) == CacheView(signal=CacheSignal.ABSENT, hit_frac=None)


def test_a_prefix_that_all_workers_hold_tells_them_apart_no_more() -> None:
    """ω moves nothing then, and the hit share is known all the same."""
    view = view_of(*[chosen(192, 192, cached_tokens=576)] * MIN_RECORDED)
    assert view == CacheView(signal=CacheSignal.ABSENT, hit_frac=0.75)


def test_a_difference_of_less_than_a_block_or_in_few_decisions_is_none() -> None:
    """What ω could act on is whole blocks, and often enough."""
    assert view_of(*[chosen(10, 20, prompt_tokens=20, cached_tokens=10)] * 64).signal is CacheSignal.ABSENT
    alike = [chosen(752, 752, cached_tokens=16)] * 96
    assert view_of(*alike, *[chosen(768, 700)] * 4).signal is CacheSignal.ABSENT
    assert view_of(*alike, *[chosen(768, 700)] * 6).signal is CacheSignal.PRESENT
    assert view_of(*alike, *[chosen(768, 900)] * 6).signal is CacheSignal.ABSENT  # more than the prompt


@pytest.mark.parametrize("count", [0, MIN_RECORDED - 1])
def test_too_few_recorded_decisions_are_unknown(count: int) -> None:
    """Most decisions come without candidates under load; only recorded ones can tell."""
    events = [chosen(768, 192, cached_tokens=576)] * count + [chosen(cached_tokens=576)] * 40
    assert view_of(*events) == CacheView(signal=CacheSignal.UNKNOWN, hit_frac=0.75)


def test_decode_legs_say_nothing_of_the_cache() -> None:
    """Measured: their candidates have nothing uncached, whatever the prompt."""
    assert view_of(*[chosen(0, 0, role=Role.DECODE)] * 64) == CacheView()


def test_the_window_is_bounded_and_forgets() -> None:
    """Invariant: the last `window` decisions, and none from before an instant."""
    overlaps = OverlapWindow(64, block_size=16)
    for number in range(200):
        overlaps.add(chosen(192, 768 if number < 136 else 192, cached_tokens=576), float(number))
    assert overlaps.view().signal is CacheSignal.ABSENT
    overlaps.forget(200.0 - MIN_RECORDED)
    assert overlaps.view().signal is CacheSignal.ABSENT
    overlaps.forget(201.0 - MIN_RECORDED)
    assert overlaps.view().signal is CacheSignal.UNKNOWN


def test_unrecorded_decisions_do_not_crowd_out_the_recorded_ones() -> None:
    """Under load most decisions come without candidates (`candidates_per_s`): the signal stays known."""
    events = [chosen(768, 768), *[chosen()] * 9] * MIN_RECORDED
    assert view_of(*events, window=64).signal is CacheSignal.ABSENT
