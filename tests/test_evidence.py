"""What workers' figures say of them and of their pool: seconds of queue, their unit, what is unknown."""

import msgspec
import pytest

from dynamo_poa.evidence import Demand, queue_s, read_pools, service
from dynamo_poa.load import WorkerState
from dynamo_poa.residency import CacheMirror
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey, WorkerLatency

CURVE = Curve(prefill_base_s=0.01, prefill_token_s=0.0001)


def rank(worker_id=1, role=Role.PREFILL, **known):
    card = WorkerCard(worker_id=worker_id, role=role, kv_block_size=16, total_kv_blocks=1000, max_num_seqs=16)
    unknown = dict.fromkeys(
        field.name for field in msgspec.structs.fields(WorkerState) if field.default is msgspec.NODEFAULT
    )
    required = {"stale": False, "prefill_tokens_total": 0, "cache": CacheMirror(None).state()}
    return WorkerState(**(unknown | required | {"key": WorkerKey(worker_id, 0), "card": card} | known))


def latencies(*workers, curve=CURVE):
    return {
        worker.key: WorkerLatency(key=worker.key, role=worker.card.role, curve=curve) for worker in workers
    }


def read(*workers, role=Role.PREFILL, demand=None):
    return read_pools(workers, latencies(*workers), demand or Demand())[role]


def test_a_queue_is_the_time_its_tokens_and_requests_take():
    """3 requests with 2000 tokens at 0.1 ms each and 10 ms a request: 0.23 s."""
    assert queue_s(rank(queued_prefill_tokens=2000, queued_requests=3), CURVE) == pytest.approx(0.23)


def test_cached_tokens_are_left_out_where_routers_know_of_them():
    """Engines count raw prompts, routers what is to be computed: the least of both bounds from above."""
    worker = rank(queued_prefill_tokens=2000, queued_requests=3, active_prefill_tokens=500)
    assert queue_s(worker, CURVE) == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("worker", "curve", "expected"),
    [
        (rank(), CURVE, None),
        (rank(queued_prefill_tokens=None, queued_requests=3), CURVE, None),
        (rank(queued_prefill_tokens=2000, queued_requests=3), None, None),
        (rank(queued_prefill_tokens=2000, queued_requests=3), Curve(decode_base_s=0.01), None),
        (rank(queued_prefill_tokens=0, queued_requests=0), None, 0.0),
    ],
    ids=["nothing said", "no tokens", "no curve", "a curve without prefill", "nothing queued"],
)
def test_an_unknown_queue_is_not_an_empty_one(worker, curve, expected):
    """Absent is not zero; and nothing takes no time on any curve."""
    assert queue_s(worker, curve) == expected


def test_the_service_time_of_a_request_has_worked_moments():
    """s = 0.01 + 0.0001 u, E[u] = 1000, E[u^2] = 2 E[u]^2: E[s] = 0.11, E[s^2] = 0.0221."""
    found = service([CURVE], 1000.0, 2000.0)
    assert found.mean_s == pytest.approx(0.11)
    assert found.effective_s == pytest.approx(0.0221 / 0.11)
    assert service([CURVE], 1000.0, None).effective_s == pytest.approx(0.0171 / 0.11)  # spread of 1.5
    assert service([CURVE], None, None) is None
    assert service([Curve()], 1000.0, None) is None


def test_a_straggler_does_not_set_the_pools_service_time():
    """The median rank's curve counts."""
    slow = Curve(prefill_base_s=0.05, prefill_token_s=0.0005)
    assert service([CURVE, slow, CURVE], 1000.0, 2000.0).mean_s == pytest.approx(0.11)


def test_a_rank_that_stands_out_hardly_moves_its_pools_queue():
    """Four ranks, one with 10 s queued: it counts like twice the median (0) and one request."""
    calm = [rank(n, queued_prefill_tokens=0, queued_requests=0) for n in (1, 2, 3)]
    hot = rank(4, queued_prefill_tokens=100_000, queued_requests=1)
    demand = Demand(tokens_mean=1000.0, tokens_effective=2000.0)
    pool = read(*calm, hot, demand=demand)
    assert pool.queue_s == pytest.approx(pool.service_s / 4)
    assert pool.unit_s == pytest.approx(0.0221 / 0.11 / 4)
    assert pool.ranks[3].queue_s == pytest.approx(10.01)


def test_a_pool_is_known_only_when_each_of_its_ranks_is():
    """One silent rank may be the one that is full."""
    calm = rank(1, queued_prefill_tokens=0, queued_requests=0, busy_frac=0.2)
    assert read(calm).known
    assert read(calm).idle
    with_silent = read(calm, rank(2))
    assert (with_silent.known, with_silent.idle, with_silent.queued) == (False, False, 0)
    assert read(calm, rank(2), rank(3)).queued is None


def test_ranks_that_are_half_busy_or_have_something_queued_are_not_idle():
    """`upstream` may only be said of workers that evidently have nothing to do."""
    calm = {"queued_prefill_tokens": 0, "queued_requests": 0}
    assert not read(rank(**calm, busy_frac=0.5)).idle
    assert not read(rank(**calm)).idle
    assert not read(rank(queued_prefill_tokens=10, queued_requests=1, busy_frac=0.2)).idle


def test_arrivals_count_where_prefill_is_all_the_work():
    """10 requests/s of 0.11 s on two ranks; an aggregated worker also decodes, so nothing is said of it."""
    demand = Demand(arrival_rate=10.0, tokens_mean=1000.0, tokens_effective=2000.0, arrived=7)
    pool = read(rank(1), rank(2), demand=demand)
    assert (pool.rate, pool.arrived) == (10.0, 7)
    assert pool.request_s == pytest.approx(0.055)
    aggregated = read(rank(1, Role.AGGREGATED), role=Role.AGGREGATED, demand=demand)
    assert (aggregated.rate, aggregated.arrived, aggregated.request_s) == (None, None, None)


def test_shares_are_of_ranks_that_say_theirs():
    """KV blocks and slots; the median rank's decode iteration."""
    pool = read(
        rank(1, kv_used_blocks=900, running_prefill_requests=4, running_decode_requests=8, iteration_s=0.01),
        rank(2, kv_used_blocks=700, running_prefill_requests=0, running_decode_requests=4, iteration_s=0.05),
        rank(3),
    )
    assert (pool.kv_frac, pool.slots_frac, pool.iteration_s) == (0.8, 0.5, 0.01)
