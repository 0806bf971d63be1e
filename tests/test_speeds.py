"""How fast workers were: the pool's typical load, predictions at it by hand."""

import pytest
from dynamo_messages import card

from dynamo_poa.serve.speeds import PoolSpeed, Speeds
from dynamo_poa.values import Curve, Role, WorkerKey, WorkerLatency
from dynamo_poa.wire import ForwardPass

W = 14370722098883561847  # above 2**63


def done(**counts: int) -> ForwardPass:
    zero = dict.fromkeys(ForwardPass.__struct_fields__, 0) | {"wall_time_s": 0.02}
    return ForwardPass(**(zero | counts))


def latency(worker_id: int, role: Role, curve: Curve, factor: float | None = None) -> WorkerLatency:
    return WorkerLatency(
        key=WorkerKey(worker_id, 0),
        role=role,
        curve=curve,
        samples=2.0,
        residual_frac=0.01,
        factor=factor,
        straggler=factor is not None and factor > 2,
    )


@pytest.fixture
def speeds() -> Speeds:
    """Decode passes of 2 and 4 requests with 100 and 300 tokens of context, a prefill pass of 500 tokens."""
    found = Speeds()
    decode, prefill = card(W, Role.DECODE, total_kv_blocks=None), card(2, Role.PREFILL)
    found.take_pass(WorkerKey(W, 0), decode, done(decode_requests=2, decode_kv_tokens=100), 0.0)
    found.take_pass(WorkerKey(W, 0), decode, done(decode_requests=4, decode_kv_tokens=300), 1.0)
    found.take_pass(WorkerKey(W, 0), decode, done(), 2.0)
    found.take_pass(WorkerKey(2, 0), prefill, done(prefill_tokens=500), 2.0)
    return found


DECODE = Curve(decode_base_s=0.01, decode_request_s=0.001, decode_kv_token_s=1e-5)
SLOW = Curve(decode_base_s=0.05, decode_request_s=0.005, decode_kv_token_s=5e-5)
PREFILL = Curve(prefill_base_s=0.02, prefill_token_s=1e-4)


def test_workers_are_told_at_their_pools_typical_load(speeds: Speeds) -> None:
    """Worked: 3 requests and 200 tokens: 0.01 + 0.003 + 0.002 s; idle passes do not count."""
    workers = speeds.workers(
        [
            latency(W, Role.DECODE, DECODE),
            latency(7, Role.DECODE, SLOW, 5.0),
            latency(2, Role.PREFILL, PREFILL),
        ]
    )
    assert [(w.worker_id, w.role, w.straggler) for w in workers] == [
        ("7", Role.DECODE, True),
        (str(W), Role.DECODE, False),
        ("2", Role.PREFILL, False),
    ]
    assert [w.iteration_s for w in workers] == [pytest.approx(0.075), pytest.approx(0.015), None]
    assert [w.prefill_s for w in workers] == [None, None, pytest.approx(0.07)]
    assert speeds.pools(workers) == (
        PoolSpeed(
            role=Role.DECODE,
            workers=2,
            passes=2,
            prefill_tokens=None,
            decode_requests=3.0,
            decode_kv_tokens=200.0,
            prefill_s=None,
            iteration_s=workers[1].iteration_s,
        ),
        PoolSpeed(
            role=Role.PREFILL,
            workers=1,
            passes=1,
            prefill_tokens=500.0,
            decode_requests=None,
            decode_kv_tokens=None,
            prefill_s=workers[2].prefill_s,
            iteration_s=None,
        ),
    )


def test_a_full_cache_slows_the_prediction_where_its_size_is_known() -> None:
    """Paper eq. 9: 1 / (1 - 1 / 1.05) - 1 / (1 - 0.8 / 1.05) is 16.8; unknown sizes are never full."""
    curve, pass_ = Curve(pressure_s=0.001), done(decode_requests=1, decode_kv_tokens=64)
    for blocks, expected in ((4, 0.001 * (21 - 4.2)), (None, 0.0)):
        found = Speeds()
        found.take_pass(WorkerKey(1, 0), card(1, Role.DECODE, total_kv_blocks=blocks), pass_, 0.0)
        (worker,) = found.workers([latency(1, Role.DECODE, curve)])
        assert worker.iteration_s == pytest.approx(expected)


def test_without_forward_passes_no_load_is_typical() -> None:
    """Unknown, not zero."""
    (worker,) = Speeds().workers([latency(1, Role.DECODE, DECODE)])
    assert (worker.prefill_s, worker.iteration_s) == (None, None)
