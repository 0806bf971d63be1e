"""Where a pool's regime, its hot workers and `upstream` show: status, /metrics, the log."""

import asyncio

import msgspec
from exposition import samples_of
from prometheus_client import generate_latest
from records import RECORD
from shown import text

from dynamo_poa.controller_metrics import ControllerMetrics
from dynamo_poa.hot import HotChange
from dynamo_poa.report import hot_events
from dynamo_poa.serve.view import record_view
from dynamo_poa.values import HotWorker, PoolRegime, Regime, Role, WorkerKey

W1 = 2**64 - 59
HOT = HotWorker(worker_id=W1, dp_rank=2, resource="queue", value=3.0, threshold=1.6)
PRESSED = msgspec.structs.replace(
    RECORD,
    driver="prefill.queue",
    bottleneck="prefill",
    iteration_s={"decode": 0.02},
    iteration_baseline_s={"decode": 0.01},
    poa_slope=0.03,
    pool_regimes={
        "prefill": PoolRegime(
            role=Role.PREFILL,
            regime=Regime.SATURATED,
            resource="queue",
            value=0.5,
            threshold=0.4,
            known=True,
        ),
        "decode": PoolRegime(role=Role.DECODE, hot=(HOT,)),
    },
)


def scraped(record):
    metrics = ControllerMetrics()
    asyncio.run(metrics.emit(record))
    return samples_of(generate_latest(metrics.registry).decode())


def test_status_shows_each_pools_regime_with_what_drives_it_and_hot_workers():
    """Issue: the regime names pool and resource; one hot worker is not a saturated fleet: say which."""
    shown = text(record_view(PRESSED))
    assert "regime      transition by prefill.queue  TTFT P99 2.000 s" in shown
    assert "saturated queue 0.50 s" in shown
    assert f"hot worker {W1} rank 2 (decode): queue 3.00 s, over 1.60 s\n" in shown
    assert "upstream" not in shown


def test_status_says_when_the_bottleneck_is_upstream():
    """I8(c)."""
    shown = text(record_view(msgspec.structs.replace(PRESSED, bottleneck="upstream")))
    assert "bottleneck  upstream of the workers, which are idle\n" in shown


def test_metrics_have_one_regime_a_pool_and_only_workers_that_are_hot_now():
    """O1: a worker that is no longer hot leaves no series."""
    found = scraped(PRESSED)
    assert found['poa_pool_regime{regime="saturated",role="prefill"}'] == 1.0
    assert found['poa_pool_regime{regime="below",role="prefill"}'] == 0.0
    hot = f'poa_worker_hot{{dp_rank="2",resource="queue",role="decode",worker_id="{W1}"}}'
    assert found[hot] == 1.0
    assert (found["poa_hat_slope"], found["poa_bottleneck_upstream"]) == (0.03, 0.0)
    assert found['poa_iteration_seconds{role="decode"}'] == 0.02
    assert found['poa_iteration_baseline_seconds{role="decode"}'] == 0.01
    assert not [name for name in scraped(RECORD) if name.startswith("poa_worker_hot")]


def test_a_hot_worker_is_an_event_with_its_id_in_full():
    """E4: past 2^53 an id is text; S2: the reason of its clearing."""
    change = HotChange(
        key=WorkerKey(W1, 2),
        role=Role.DECODE,
        resource="kv_blocks",
        overloaded=False,
        value=None,
        threshold=0.9,
        reason="kv_blocks expired: no longer sent",
    )
    (event,) = hot_events([change])
    assert (event.name, event.before, event.after, event.reason) == (
        "poa.worker.cleared",
        {"overloaded": True},
        {"overloaded": False},
        "kv_blocks expired: no longer sent",
    )
    assert event.details == {
        "worker_id": str(W1),
        "dp_rank": 2,
        "role": Role.DECODE,
        "resource": "kv_blocks",
        "value": None,
        "threshold": 0.9,
    }
    (event,) = hot_events([msgspec.structs.replace(change, overloaded=True)])
    assert event.name == "poa.worker.overloaded"
