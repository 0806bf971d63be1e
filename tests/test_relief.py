"""A slow worker is found by the controller's word, and relieved when its picks say so."""

from collections.abc import Sequence

import msgspec
import pytest
from test_story import record

from dynamo_poa.bench.relief import RECENT_PICKS, ReliefWatch, SlowWorker
from dynamo_poa.bench.story import Story
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Curve, PoolLoad, Regime, Role, Selection, WorkerKey, WorkerLatency
from dynamo_poa.wire import Chosen, DecisionBatch

WORKERS, SLOW = (1, 2, 3, 2**63), 2**63
STRAGGLER = WorkerLatency(
    key=WorkerKey(SLOW, 0), role=Role.DECODE, curve=Curve(), samples=30.0, factor=4.9, straggler=True
)


def tick(
    at_s: float, selection: Selection = Selection.KV, stragglers: Sequence[WorkerLatency] = (STRAGGLER,)
) -> TelemetryRecord:
    return msgspec.structs.replace(
        record(Regime.BELOW, 0.0, 1.0, 0),
        at_s=at_s,
        selection=selection,
        stragglers=tuple(stragglers),
        pools={"decode": PoolLoad(role=Role.DECODE, workers=4)},
    )


def picks(workers: Sequence[int], role: Role = Role.DECODE) -> DecisionBatch:
    events = tuple(Chosen("r", role, 1.0, 1.0, worker, 0, 8, 1, 1, ()) for worker in workers)
    return DecisionBatch(router_id="r", sequence=0, sent_at_s=0.0, events=events)


def test_the_worst_decode_straggler_is_named_once_with_the_time_it_took_to_find() -> None:
    """Slow prefill workers are another matter; before load there is nothing to find."""
    watch = ReliefWatch()
    assert watch.on_telemetry(tick(100.0)) == []
    watch.begin()
    of_prefill = msgspec.structs.replace(STRAGGLER, role=Role.PREFILL, factor=9.0)
    milder = msgspec.structs.replace(STRAGGLER, key=WorkerKey(1, 0), factor=2.0)
    assert watch.on_telemetry(tick(101.0, stragglers=[of_prefill])) == []
    assert watch.on_telemetry(tick(105.5, stragglers=[milder, STRAGGLER])) == [
        f"slow    decode worker {SLOW} takes 4.9 times as long as its pool's median"
    ]
    assert watch.on_telemetry(tick(106.0)) == []
    found = watch.slow_worker([Selection.KV])
    assert found is not None
    assert (found.worker_id, found.factor, found.found_after_s) == (str(SLOW), 4.9, 4.5)


def test_relief_is_told_once_its_recent_picks_are_half_a_fair_share_by_marginal_cost() -> None:
    """A lull under Dynamo's own selection is no relief; prefill picks do not count."""
    watch = ReliefWatch()
    watch.begin()
    watch.on_telemetry(tick(1.0))
    watch.on_batch(picks([1, 2, 3] * 40))
    watch.on_batch(picks([SLOW] * 500, Role.PREFILL))
    assert watch.on_telemetry(tick(2.0)) == []
    watch.on_batch(picks([SLOW] * 13 + [1] * 87))
    assert watch.on_telemetry(tick(3.0, Selection.MARGINAL)) == []  # 12.5 are half a fair share
    watch.on_batch(picks([1]))
    assert watch.on_telemetry(tick(4.0, Selection.MARGINAL)) == [
        f"relief  it had 12 of the last {RECENT_PICKS} decode picks; 25 were a fair share"
    ]
    assert watch.on_telemetry(tick(5.0, Selection.MARGINAL)) == []


def test_its_share_is_told_phase_by_phase_and_by_who_selected() -> None:
    """Worked: a quarter of 80, then 5 of 100 and 1 of 20."""
    story = Story()
    for name, selection, workers in (
        ("held", Selection.KV, list(WORKERS) * 20),
        ("busy", Selection.MARGINAL, [SLOW] * 5 + [1] * 95),
        ("calm", Selection.MARGINAL, [SLOW] + [2] * 19),
    ):
        story.begin(name, 8, 0.0)
        story.on_batch(picks(workers))
        story.on_telemetry(tick(10.0, selection))
        story.end(1.0)
    report = story.report(cpu_busy_frac=0.1, seconds=3.0)
    assert [phase.slow_share for phase in report.phases] == [0.25, 0.05, 0.05]
    assert [phase.selection for phase in report.phases] == ["kv", "marginal", "marginal"]
    assert report.slow_worker == SlowWorker(
        worker_id=str(SLOW),
        factor=4.9,
        found_after_s=0.0,
        fair_share=0.25,
        share_before=0.25,
        share_after=0.05,
    )
    assert report.relieved


@pytest.mark.parametrize(
    ("share_after", "relieved"), [(0.125, True), (0.13, False), (None, False), (0.0, True)]
)
def test_a_worker_is_relieved_when_it_gets_half_a_fair_share_or_less(
    share_after: float | None, relieved: bool
) -> None:
    """Without a phase under marginal cost nothing is claimed."""
    found = SlowWorker(
        worker_id="1",
        factor=5.0,
        found_after_s=3.0,
        fair_share=0.25,
        share_before=0.25,
        share_after=share_after,
    )
    assert found.relieved is relieved


def test_without_a_slow_worker_nothing_was_found_and_no_phase_has_a_share() -> None:
    """None, never 0."""
    story = Story()
    story.begin("calm", 4, 0.0)
    story.on_batch(picks(WORKERS))
    story.on_telemetry(tick(1.0, stragglers=()))
    story.end(1.0)
    report = story.report(cpu_busy_frac=0.1, seconds=1.0)
    assert (report.slow_worker, report.phases[0].slow_share, report.relieved) == (None, None, False)
