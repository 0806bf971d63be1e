"""Numbered streams: new, late, repeated, restarted."""

from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.ordering import MAX_AWAITED, MAX_JUMP, Numbering, Place


def places(numbering: Numbering, *numbers: int) -> list[Place]:
    return [numbering.place(number) for number in numbers]


def test_reordered_and_repeated_numbers_are_told_apart() -> None:
    """Case E1: 1,2,3,3,6,5,4,7 has one repeat and one gap, which closes."""
    numbering = Numbering()
    assert places(numbering, 1, 2, 3, 3, 6, 5, 4, 7) == [
        Place.NEW,
        Place.NEW,
        Place.NEW,
        Place.REPEATED,
        Place.NEW,
        Place.LATE,
        Place.LATE,
        Place.NEW,
    ]
    assert (numbering.repeated, numbering.gaps_opened, numbering.gaps_closed, numbering.missing) == (
        1,
        1,
        1,
        0,
    )


def test_the_first_number_is_no_gap() -> None:
    """Case E3: joining at 812 is not a gap of 811, and what came before is not awaited."""
    numbering = Numbering()
    assert places(numbering, 812, 811) == [Place.NEW, Place.REPEATED]
    assert (numbering.missing, numbering.gaps_opened) == (0, 0)


def test_what_is_given_up_stays_reported_and_is_not_taken_later() -> None:
    """Case E1: missing stays reported; a number is taken at most once."""
    numbering = Numbering()
    places(numbering, 1, 2, 5, 9)
    numbering.give_up(below=5)
    assert (numbering.awaited, numbering.given_up, numbering.missing) == ({6, 7, 8}, 2, 5)
    assert places(numbering, 3, 6) == [Place.REPEATED, Place.LATE]
    numbering.give_up()
    assert (numbering.awaited, numbering.given_up, numbering.gaps_closed) == (set(), 4, 0)


def test_a_wide_gap_costs_a_count_and_no_memory() -> None:
    """Invariant: memory does not grow with the size of a gap."""
    numbering = Numbering()
    assert places(numbering, 1, 2 + MAX_AWAITED, 3 + 2 * MAX_AWAITED) == [Place.NEW] * 3
    assert numbering.awaited == set()
    assert (numbering.missing, numbering.gaps_opened) == (2 * MAX_AWAITED, 1)


def test_a_number_far_off_begins_the_stream_anew_in_both_directions() -> None:
    """One garbage number must not turn every later message into a repeat."""
    numbering = Numbering()
    far = 12 + MAX_JUMP
    assert places(numbering, 10, far, 11, 12) == [Place.NEW, Place.RESTARTED, Place.RESTARTED, Place.NEW]
    assert (numbering.newest, numbering.missing) == (12, 0)


@settings(derandomize=True, max_examples=200)
@given(st_.lists(st_.integers(0, 60), max_size=80))
def test_each_number_is_taken_at_most_once_and_missing_is_what_is_not_there(numbers: list[int]) -> None:
    """Invariant, against the plain definition of both."""
    numbering = Numbering()
    taken = [number for number in numbers if numbering.place(number) is not Place.REPEATED]
    assert len(taken) == len(set(taken))
    if taken:
        assert numbering.awaited == set(range(taken[0], max(taken) + 1)) - set(taken)
