"""The prompts of late: what counts, second by second, and for how long."""

import math

import numpy as np
import pytest

from dynamo_poa.prompts import PromptWindow
from dynamo_poa.values import Role
from dynamo_poa.wire import Chosen


def chosen(prompt: int, cached: int = 0, role: Role = Role.PREFILL, attempt: int = 1) -> Chosen:
    return Chosen("r", role, 0.0, 0.0, 1, 0, prompt, 0, attempt, (), cached)


def test_seconds_are_summed_and_the_one_that_runs_is_left_out() -> None:
    """A second without a prompt is a row of zeros: the rate is over all of them.

    The first that anything comes in has begun before, so its rate would be too low.
    """
    window = PromptWindow(60.0)
    window.add(chosen(7), 9.9)
    for at_s, prompt, cached in ((10.2, 100, 40), (10.9, 50, 0), (12.0, 200, 199), (13.5, 9, 0)):
        window.add(chosen(prompt, cached), at_s)
    expected = [[2, 110, 60**2 + 50**2, 150, 100**2 + 50**2], [0] * 5, [1, 1, 1, 200, 200**2]]
    assert window.seconds(13.9).tolist() == expected
    assert window.seconds(14.0).tolist() == [*expected, [1, 9, 81, 9, 81]]


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    """An engine computes the last token at least; a router may say that more than all is cached."""
    window = PromptWindow(60.0)
    window.add(chosen(7), 0.5)
    window.add(chosen(64, 64), 1.0)
    window.add(chosen(64, 80), 1.0)
    assert window.seconds(2.0).tolist() == [[2, 2, 2, 128, 2 * 64**2]]


@pytest.mark.parametrize("event", [chosen(100, role=Role.DECODE), chosen(100, attempt=2)])
def test_a_decode_leg_and_a_second_try_are_no_new_prompts(event: Chosen) -> None:
    """The same request, told once more."""
    window = PromptWindow(60.0)
    window.add(event, 1.0)
    assert window.seconds(5.0).shape == (0, 5)


def test_the_window_moves_on_and_forgets() -> None:
    """Whole seconds of the last `window_s`: the rest counts no more, forgotten or not."""
    window = PromptWindow(3.0)
    for second in range(10):
        window.add(chosen(second + 1), second + 0.5)
    assert window.seconds(10.0)[:, 3].tolist() == [8, 9, 10]
    assert window.seconds(10.5)[:, 3].tolist() == [9, 10]  # of the eighth only half lies in it
    window.forget(10.5)
    assert window.seconds(9.0)[:, 3].tolist() == [0, 0, 9]
    assert window.seconds(100.0)[:, 0].tolist() == [0, 0, 0]


def test_a_window_without_end_keeps_all() -> None:
    """A recording is judged as a whole."""
    window = PromptWindow(math.inf)
    for at_s in (0.0, 1.0, 999.0):
        window.add(chosen(7), at_s)
    window.look(lambda: 3, 1.0)
    window.forget(1000.0)
    assert np.array_equal(np.flatnonzero(window.seconds(1000.0)[:, 0]), [0, 998])
    assert np.array_equal(np.flatnonzero(window.in_flight(1000.0) == 3), [0])


def test_what_is_in_flight_is_counted_once_a_second_beside_the_prompts() -> None:
    """Whoever is heard first in one; the same seconds as the prompts', unknown where nobody was heard."""
    window = PromptWindow(3.0)
    assert window.in_flight(5.0).tolist() == []
    counts = iter((5, 6, 7, 8, 9))
    window.add(chosen(7), 10.5)
    for at_s in (10.5, 11.2, 11.9, 13.0, 14.5, 15.0):
        window.look(lambda: next(counts), at_s)
    assert np.array_equal(window.in_flight(14.9), [np.nan, 7.0], equal_nan=True)
    assert np.array_equal(window.in_flight(15.0), [np.nan, 7.0, 8.0], equal_nan=True)
    assert len(window.seconds(15.0)) == 3
    window.forget(16.5)
    assert np.array_equal(window.in_flight(15.0), [np.nan, np.nan, 8.0], equal_nan=True)
