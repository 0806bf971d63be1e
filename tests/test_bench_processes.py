"""What processes and the machine cost, from what the kernel counts."""

import os

from dynamo_poa.bench.processes import busy_frac, machine_time_of

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NOTHING = machine_time_of([0] * 8, niced=False)


def test_a_machine_is_as_busy_as_all_that_is_not_idle() -> None:
    """proc(5): user, system, interrupts and steal; of 100 s, 20 idle and 10 waiting for a disk."""
    ticks = [TICKS_PER_S * seconds for seconds in (30, 0, 20, 20, 10, 5, 5, 10)]
    found = machine_time_of(ticks, niced=False)
    assert found == (70.0, 100.0)
    assert busy_frac(NOTHING, found) == 0.7


def test_niced_processes_count_for_who_is_niced() -> None:
    """Found in review: under `nice` the graphs are niced as well, and no cell of theirs was ever void."""
    ticks = [TICKS_PER_S * seconds for seconds in (5, 90, 0, 5, 0, 0, 0, 0)]
    assert busy_frac(NOTHING, machine_time_of(ticks, niced=False)) == 0.05
    assert busy_frac(NOTHING, machine_time_of(ticks, niced=True)) == 0.95
