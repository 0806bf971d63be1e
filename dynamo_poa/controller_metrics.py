"""What /metrics says of the controller.

Owns: names, help and values of its metrics, made at the moment of the scrape.
Does not own: the record they are made from and the HTTP server (telemetry.py).
Invariant: what is unknown is absent, never 0 or NaN; what is gone leaves no series behind.
Source: case O1 (ghost series).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamo_poa.fleet import PublisherState
from dynamo_poa.games_metrics import games_families
from dynamo_poa.load import WorkerState
from dynamo_poa.policy_metrics import PolicyMetrics
from dynamo_poa.regime_state import UPSTREAM
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import REGIMES, CacheSignal, WorkerLatency


class ControllerMetrics:
    """The latest record as Prometheus sees it.

    Everything is made at the moment of the scrape from the record and the workers and publishers there are
    then: a worker that is gone leaves no series behind, and a late message of its cannot bring one back.
    """

    def __init__(
        self,
        workers: Callable[[], Iterable[WorkerState]] = tuple,
        publishers: Callable[[], Iterable[PublisherState]] = tuple,
        latencies: Callable[[], Iterable[WorkerLatency]] = tuple,
    ) -> None:
        self.dropped = 0
        self.registry = CollectorRegistry()
        self._workers = workers
        self._publishers = publishers
        self._latencies = latencies
        self._record: TelemetryRecord | None = None
        self._outcomes: Counter[str] = Counter()
        self._policies = PolicyMetrics()
        self.registry.register(self)

    async def emit(self, record: TelemetryRecord) -> None:
        """Take one record."""
        self._record = record
        self._outcomes[record.applied] += 1
        self._policies.take(record)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        record = self._record
        if record is None:
            return
        yield from _gauges(record)
        yield _labelled(
            "poa_regime", "1 for the regime in force", "regime", {r: r is record.regime for r in REGIMES}
        )
        yield _labelled(
            "poa_cache_signal",
            "1 for what is known: whether workers differ in what they hold of a prompt",
            "signal",
            {signal: signal is record.cache_signal for signal in CacheSignal},
        )
        yield _labelled("poa_hat_role", "PoA-hat of one leg", "role", record.poa_by_role)
        for leg, values in _leg_families(record):
            yield _labelled(*leg, "role", values)
        if record.poa_shares is not None:
            shares = msgspec.structs.asdict(record.poa_shares)
            yield _labelled("poa_excess_share", "share of the cost beyond an unloaded system", "kind", shares)
        for name, help_text in _POOL_GAUGES.items():
            values = {role: getattr(pool, name) for role, pool in record.pools.items()}
            yield _labelled(f"poa_pool_{name}", help_text, "role", values)
        yield from _pool_regimes(record)
        yield _labelled("poa_iteration_seconds", "time of a decode-only pass", "role", record.iteration_s)
        yield _labelled(
            "poa_iteration_baseline_seconds",
            "that which counts as unloaded",
            "role",
            record.iteration_baseline_s,
        )
        yield _labelled(
            "poa_router_applied_revision",
            "revision a router reports",
            "router_id",
            {router.router_id: router.revision for router in record.routers},
        )
        yield from _counters(record, self._outcomes)
        yield from self._policies.collect(record)
        yield from games_families(record)
        yield from _worker_families(self._workers())
        yield from _latency_gauges(self._latencies())
        yield from _publisher_gauges(self._publishers())


_GAUGES = {
    "poa_hat": ("poa_hat", "observed over best cost of the requests in flight"),
    "poa_hat_low": ("poa_low", "lower end of its 95 % interval"),
    "poa_hat_high": ("poa_high", "upper end of its 95 % interval"),
    "poa_hat_samples": ("poa_samples", "snapshots behind PoA-hat"),
    "poa_hat_frozen": ("poa_frozen", "the paper's estimate, on decisions, not calibrated"),
    "poa_hat_slope": ("poa_slope", "change of PoA-hat a second, over the last 30 s"),
    "poa_ttft_curvature_frac": ("curvature", "share of TTFT P50 that is quadratic in load"),
    "poa_ttft_p50_seconds": ("ttft_p50_s", "TTFT P50 over the window"),
    "poa_ttft_p99_seconds": ("ttft_p99_s", "TTFT P99 over the window"),
    "poa_ttft_p99_average_seconds": ("ttft_average_s", "its moving average"),
    "poa_ttft_samples": ("ttft_samples", "requests behind TTFT"),
    "poa_ttft_baseline_seconds": ("baseline_s", "TTFT P99 that counts as unloaded"),
    "poa_theta1_seconds": ("theta1_s", "TTFT P99 that ends `below`"),
    "poa_theta2_seconds": ("theta2_s", "TTFT P99 that begins `saturated`"),
    "poa_in_flight_requests": ("in_flight", "requests being served"),
    "poa_arrival_rate": ("arrival_rate", "requests per second"),
    "poa_shed_frac": ("shed_frac", "share of arrivals refused"),
    "poa_censored": ("censored", "1 while refusals leave only survivors in TTFT and PoA-hat"),
    "poa_cache_hit_frac": ("cache_hit_frac", "share of prompt tokens found cached"),
    "poa_router_temperature": ("router_temperature", "τ in force"),
    "poa_overlap_weight": ("overlap_weight", "ω in force"),
    "poa_params_revision": ("revision", "revision in force"),
    "poa_wanted_router_temperature": ("wanted_router_temperature", "τ the policy would set"),
    "poa_wanted_overlap_weight": ("wanted_overlap_weight", "ω the policy would set"),
    "poa_bus_connected": ("bus_connected", "1 while NATS is connected"),
    "poa_message_age_seconds": ("message_age_s", "since the last message of any kind"),
    "poa_message_rate": ("message_rate", "event-plane messages per second"),
    "poa_tick_seconds": ("tick_s", "computing time of the last tick"),
    "poa_last_tick_timestamp_seconds": ("at_s", "when the last decision was made"),
}

_POOL_GAUGES = {
    "workers": "worker ranks present",
    "stale_workers": "of them silent",
    "kv_used_frac": "share of KV blocks in use",
    "kv_used_frac_max": "the fullest rank's",
    "queued_requests": "requests waiting in engines",
    "queued_prefill_tokens": "prompt tokens waiting in engines",
    "running_requests": "requests running in engines",
    "active_decode_blocks": "KV blocks booked by routers",
    "active_prefill_tokens": "prompt tokens booked by routers",
    "busy_frac": "share of time in which a forward pass ran",
}

_WORKER_GAUGES = {
    "kv_used_frac": "share of the rank's KV blocks in use",
    "queued_requests": "requests waiting in the engine",
    "active_decode_blocks": "KV blocks booked by routers",
    "busy_frac": "share of time in which a forward pass ran",
    "stale": "1 while the rank is silent",
}

_CURVE_GAUGES = {
    "prefill_base_s": ("prefill_base_seconds", "of a prefill pass, whatever its tokens"),
    "prefill_token_s": ("prefill_token_seconds", "of a prefill pass, for each prompt token"),
    "decode_base_s": ("decode_base_seconds", "of a decode iteration, whatever its batch"),
    "decode_request_s": ("decode_request_seconds", "of a decode iteration, for each request"),
    "decode_kv_token_s": ("decode_kv_token_seconds", "of a decode iteration, for each KV token resident"),
}

_LATENCY_GAUGES = {
    "factor": ("speed_factor", "its time over that of its pool's median worker at the same load"),
    "straggler": ("straggler", "1 for a worker slower than its pool by more than the configured factor"),
    "residual_frac": ("latency_residual_frac", "error of its latency model, as a share of the mean"),
}

_CACHE_GAUGES = {
    "resident_blocks": ("resident_blocks", "blocks in the device tier of the rank's cache"),
    "approximate": ("resident_approximate", "1 while they are not known exactly: events were missed"),
}

_PUBLISHER_GAUGES = {
    "age_s": ("age_seconds", "since the publisher last spoke"),
    "skew_s": ("skew_seconds", "its clock minus ours at its last message"),
    "missing": ("missing", "messages its numbering says were sent and that have not come"),
    "repeated": ("repeated", "envelopes that came again"),
}


def _gauges(record: TelemetryRecord) -> Iterator[Metric]:
    for name, (field, help_text) in _GAUGES.items():
        value = getattr(record, field)
        if value is not None:
            yield GaugeMetricFamily(name, help_text, value=float(value))


def _labelled(name: str, help_text: str, label: str, values: dict[Any, Any]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([str(key)], float(value))
    return family


def _leg_families(record: TelemetryRecord) -> Iterator[tuple[tuple[str, str], dict[str, float | None]]]:
    """Yield name, help and values by leg of what is told of each leg's PoA-hat."""
    legs = record.poa_legs
    yield (
        ("poa_hat_role_low", "lower end of its 95 % interval"),
        {role: leg.low for role, leg in legs.items()},
    )
    yield ("poa_hat_role_high", "upper end of its 95 % interval"), {r: leg.high for r, leg in legs.items()}
    yield ("poa_hat_frozen_role", "the paper's estimate of one leg"), {**record.poa_frozen_by_role}


def _pool_regimes(record: TelemetryRecord) -> Iterator[Metric]:
    regimes = GaugeMetricFamily("poa_pool_regime", "1 for the regime a pool is in", labels=["role", "regime"])
    hot = GaugeMetricFamily(
        "poa_worker_hot",
        "1 for a worker that is overloaded while its pool is not",
        labels=["worker_id", "dp_rank", "role", "resource"],
    )
    for role, pool in record.pool_regimes.items():
        for regime in REGIMES:
            regimes.add_metric([role, str(regime)], float(regime is pool.regime))
        for worker in pool.hot:
            hot.add_metric([str(worker.worker_id), str(worker.dp_rank), role, worker.resource], 1.0)
    upstream = record.bottleneck == UPSTREAM
    yield regimes
    yield hot
    yield GaugeMetricFamily(
        "poa_bottleneck_upstream", "1 while TTFT is bad and the workers are idle", value=float(upstream)
    )


def _counters(record: TelemetryRecord, outcomes: Counter[str]) -> Iterator[Metric]:
    for name, help_text, label, counts in (
        ("poa_params_applied", "ticks by what became of their wish", "outcome", outcomes),
        ("poa_params_refused", "records in the store not taken", "reason", record.params_refused),
        ("poa_messages_received", "event-plane messages taken in", "topic", record.messages_received),
        ("poa_messages_dropped", "messages dropped, and other losses", "reason", record.messages_dropped),
        ("poa_requests_ended", "legs that ended", "outcome", record.requests_ended),
    ):
        family = CounterMetricFamily(name, help_text, labels=[label])
        for key, count in counts.items():
            family.add_metric([str(key)], count)
        yield family
    for name, help_text, value in (
        ("poa_ticks", "ticks made", record.tick),
        ("poa_ticks_failed", "ticks that failed", record.failed_ticks),
        ("poa_regime_changes", "regime changes", record.regime_changes),
        ("poa_params_swaps", "changes of setting", record.swaps),
    ):
        yield CounterMetricFamily(name, help_text, value=value)


def _worker_families(workers: Iterable[WorkerState]) -> Iterator[Metric]:
    names = ["worker_id", "dp_rank", "role"]
    of_rank = {
        field: GaugeMetricFamily(f"poa_worker_{field}", text, labels=names)
        for field, text in _WORKER_GAUGES.items()
    }
    of_cache = {
        field: GaugeMetricFamily(f"poa_worker_{name}", text, labels=names)
        for field, (name, text) in _CACHE_GAUGES.items()
    }
    prefilled = CounterMetricFamily(
        "poa_worker_prefill_tokens", "prompt tokens computed since the rank appeared", labels=names
    )
    for worker in workers:
        labels = [str(worker.key.worker_id), str(worker.key.dp_rank), str(worker.card.role)]
        prefilled.add_metric(labels, worker.prefill_tokens_total)
        for source, families in ((worker, of_rank), (worker.cache, of_cache)):
            for field, family in families.items():
                value = getattr(source, field)
                if value is not None:
                    family.add_metric(labels, float(value))
    yield from of_rank.values()
    yield from of_cache.values()
    yield prefilled


def _latency_gauges(latencies: Iterable[WorkerLatency]) -> Iterator[Metric]:
    names = ["worker_id", "dp_rank", "role"]
    families = {
        field: GaugeMetricFamily(f"poa_worker_{name}", text, labels=names)
        for field, (name, text) in (_LATENCY_GAUGES | _CURVE_GAUGES).items()
    }
    for latency in latencies:
        labels = [str(latency.key.worker_id), str(latency.key.dp_rank), str(latency.role)]
        for field, family in families.items():
            value = getattr(latency if field in _LATENCY_GAUGES else latency.curve, field)
            if value is not None:
                family.add_metric(labels, float(value))
    yield from families.values()


def _publisher_gauges(publishers: Iterable[PublisherState]) -> Iterator[Metric]:
    families = {
        field: GaugeMetricFamily(f"poa_publisher_{name}", text, labels=["publisher_id", "topic"])
        for field, (name, text) in _PUBLISHER_GAUGES.items()
    }
    for publisher in publishers:
        for field, family in families.items():
            labels = [str(publisher.publisher_id), publisher.topic]
            family.add_metric(labels, float(getattr(publisher, field)))
    yield from families.values()
