"""What the latency figure makes of passes it heard, on worked numbers."""

import msgspec
import pytest
from dynamo_messages import W1, W2, card, envelope, fp, subject

from dynamo_poa.bench.latency import Cost, Heard, Judged, Run, figure, judge, settled_s, slow
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import ForwardPass, decode_dynamo


def heard(worker_id: int, number: int, wall_time_s: float, at_s: float) -> Heard:
    topic, body = fp(worker_id, number, wall_time_s, np=1, pt=100)
    data = envelope(topic, msgspec.msgpack.encode(body), worker_id % 1000, number, at_s)
    return Heard(at_s, subject(topic), data)


def body(one: Heard) -> ForwardPass:
    done = decode_dynamo(one.subject, one.data).body
    assert isinstance(done, ForwardPass)
    return done


def test_a_slowed_worker_takes_longer_and_does_less_from_an_instant_on() -> None:
    """Wall times x 3 and one pass in three; before it and beside it nothing changes."""
    passes = [heard(worker_id, at_s, 0.1, float(at_s)) for at_s in range(1, 13) for worker_id in (W1, W2)]
    left = [(body(one).worker_id, one.at_s, body(one).wall_time_s) for one in slow(passes, {W1}, 7.0)]
    assert [(at_s, wall) for worker_id, at_s, wall in left if worker_id == W2] == [
        (float(at_s), 0.1) for at_s in range(1, 13)
    ]
    assert [(at_s, wall) for worker_id, at_s, wall in left if worker_id == W1] == [
        *((float(at_s), 0.1) for at_s in range(1, 7)),
        (9.0, pytest.approx(0.3)),
        (12.0, pytest.approx(0.3)),
    ]


def test_a_pass_is_judged_by_what_was_known_the_second_before() -> None:
    """The first second is known to nobody; a pass twice as long as the rest was foretold half wrongly."""
    passes = [heard(W1, number, 0.1, number / 10) for number in range(1, 15)]
    passes.append(heard(W1, 15, 0.2, 1.5))
    judged, found = judge("ns", [card(W1, Role.PREFILL)], passes)
    assert [(one.at_s, one.worker_id, one.role) for one in judged] == [
        (at_s, W1, Role.PREFILL) for at_s in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
    ]
    assert [one.error for one in judged] == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.0, 0.5], abs=1e-4)
    assert found[WorkerKey(W1, 0)].samples == pytest.approx(9.0, abs=0.1)


def test_a_worker_has_settled_after_the_last_second_that_was_off() -> None:
    """By medians of whole seconds, of that worker, from the instant on."""
    errors = {9.5: 0.9, 10.2: 0.6, 11.2: 0.6, 12.1: 0.1, 13.4: 0.2, 14.9: 0.15}
    judged = [Judged(at_s, W1, Role.DECODE, error) for at_s, error in errors.items()]
    judged += [Judged(14.5, W2, Role.DECODE, 0.9), Judged(13.5, W1, Role.DECODE, 0.2)]
    assert settled_s(judged, W1, 10.0, 0.15) == 4.0
    assert settled_s(judged, W1, 14.0, 0.15) == 0.0


def test_the_figure_takes_passes_after_thirty_seconds_and_those_slowed_twenty_later() -> None:
    """Goals: 10 % by role; 15 % after a slowdown, within 20 s; 5 µs a pass."""
    roles = {Role.PREFILL: W1, Role.DECODE: W2}
    live = [
        Judged(at_s, roles[role], role, error) for role in roles for at_s, error in ((29, 0.9), (31, 0.02))
    ]
    slowed = [
        Judged(at_s, roles[role], role, error) for role in roles for at_s, error in ((31, 0.6), (51, 0.04))
    ]
    slowed.append(Judged(55.5, W2, Role.DECODE, 0.5))
    run = Run("ns", (), [], 0.5)
    found = figure(
        run, live, roles, slowed, {Role.PREFILL: 3.0, Role.DECODE: None}, Cost(0.3, [7.0, 9.0, 8.0])
    )
    assert {measure.key: measure.value for measure in found.measures} == pytest.approx(
        {
            "prefill_error": 2.0,
            "prefill_settled_s": 2.0,
            "prefill_slowed_error": 4.0,
            "prefill_factor": 3.0,
            "decode_error": 2.0,
            "decode_settled_s": 26.0,
            "decode_slowed_error": 27.0,
            "observe_us": 0.3,
            "fit_ms": 8.0,
        }
    )
    missed = [measure.key for measure in found.measures if measure.reached is False]
    assert missed == ["decode_settled_s", "decode_slowed_error"]


def test_a_run_that_ends_too_early_says_nothing() -> None:
    """No pass to judge is no figure, least of all 0 %."""
    live = [Judged(12.0, W1, Role.PREFILL, 0.1)]
    with pytest.raises(MeasurementError, match="longer than 50 s"):
        figure(Run("ns", (), [], 0.5), live, {Role.PREFILL: W1}, [], {}, Cost(0.3, [7.0]))
