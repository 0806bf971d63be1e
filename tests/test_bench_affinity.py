"""The suite `caching`: what its table says, and when it says that something rises."""

import msgspec

from dynamo_poa.bench.suites.affinity import SUITE, cells, rising, told
from dynamo_poa.bench.suites.cells import Result

POA = {1.0: 1.5, 0.5: 2.0, 0.0: 3.0}


def results(**changed):
    """Three seeds under three ω, with the same figures in each; `seed3` changes those of the third."""
    found = []
    for cell in cells(SUITE, (1, 2, 3)):
        weight = cell.policy.overlap_credit
        figures = {
            "poa_caching": POA[weight],
            "duplication": 2.0 - weight / 2,
            "hit_frac": 0.2 + weight / 2,
            "ttft_mean_s": 0.1,
        }
        found.append(Result(cell=cell, state="done", figures=figures))
    if changed:
        *rest, last = found  # the third seed without cache affinity
        figures = {key: value for key, value in (last.figures | changed).items() if value is not None}
        found = [*rest, msgspec.structs.replace(last, figures=figures)]
    return found


def test_the_table_is_by_weight_and_says_what_rises() -> None:
    """Issue 7: duplication and PoA-hat of caching, highest ω first; what telemetry lacked is `-`."""
    table, against = told(results())
    assert [[field.main for field in row] for row in table.rows] == [
        ["1", "1.5", "1.5", "70%", "-", "-", "0.1"],
        ["0.5", "2", "1.75", "45%", "-", "-", "0.1"],
        ["0", "3", "2", "20%", "-", "-", "0.1"],
    ]
    assert table.note.endswith(
        "PoA-hat of caching: higher at the lowest ω than at the highest in 3 of 3 seeds, "
        "higher with every step in 3; "
        "copies of a block: higher at the lowest ω than at the highest in 3 of 3 seeds, "
        "higher with every step in 3."
    )
    assert [[field.verdict for field in row[1:4]] for row in against.rows] == [["worse"] * 3] * 2


def test_a_seed_in_which_it_does_not_rise_is_counted() -> None:
    """Nothing is left out because it disappoints."""
    assert rising(results(duplication=1.75)).endswith(
        "copies of a block: higher at the lowest ω than at the highest in 3 of 3 seeds, "
        "higher with every step in 2."
    )
    assert rising(results(duplication=1.5)).endswith("in 2 of 3 seeds, higher with every step in 2.")


def test_a_seed_without_a_figure_is_said_to_lack_it() -> None:
    """There is no PoA-hat where the best placement costs nothing."""
    assert rising(results(poa_caching=None)).startswith(
        "PoA-hat of caching: higher at the lowest ω than at the highest in 2 of 2 seeds, "
        "higher with every step in 2 (1 lack a figure);"
    )


def test_other_suites_have_no_such_table() -> None:
    """They have ω under policies that move it."""
    others = [
        msgspec.structs.replace(result, cell=msgspec.structs.replace(result.cell, suite="hetero"))
        for result in results()
    ]
    assert list(told(others)) == []
