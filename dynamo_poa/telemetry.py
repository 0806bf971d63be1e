"""What is said of each tick and of each event, and where it goes.

Owns: the canonical record of a tick, names of log events and metrics, logging's set-up, the /metrics server.
Does not own: when a record is made (loop.py) or what is in it (controller.py).
Invariant: one record, thin sinks: log line, event plane and /metrics say the same; what is unknown is absent,
           never 0 or NaN; numbers too large for a JSON number are text.
Source: cases O1 (ghost series, port clash), E4 (identifiers past 2^53).
"""

import errno
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamo_poa.bus import Bus
from dynamo_poa.errors import BusError, ConfigError
from dynamo_poa.fleet import PublisherState
from dynamo_poa.load import WorkerState
from dynamo_poa.values import (
    REGIMES,
    Applied,
    CacheSignal,
    Estimate,
    Mode,
    ParamsKind,
    PoolLoad,
    PoolRegime,
    Regime,
    Shares,
    WorkerLatency,
)
from dynamo_poa.wire import subject

# Log events: one name, one shape. The bus, which this module needs, has its own beside their use.
STARTED = "poa.controller.started"
SECOND = "poa.controller.second"
WAITING = "poa.controller.waiting"
STOPPED = "poa.controller.stopped"
TICK = "poa.tick"
TICK_FAILED = "poa.tick.failed"
REGIME_CHANGED = "poa.regime.changed"
WORKER_OVERLOADED = "poa.worker.overloaded"
WORKER_CLEARED = "poa.worker.cleared"
PARAMS_APPLIED = "poa.params.applied"
PARAMS_HELD = "poa.params.held"
PARAMS_TAKEN = "poa.params.taken"
PARAMS_EXPIRED = "poa.params.expired"
PARAMS_REFUSED = "poa.params.refused"
PARAMS_UNREAD = "poa.params.unread"
PARAMS_RESTORED = "poa.params.restored"
STORE_UNREAD = "poa.store.unread"
FRONTEND_UNREACHABLE = "poa.frontend.unreachable"
HEARTBEAT_MISSED = "poa.heartbeat.missed"
NOTICED = "poa.message.noticed"

# JavaScript and most JSON tools round beyond this.
MAX_JSON_INT = 2**53

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """One router as last heard; `dropped` are its own decision events, `age_s` since its last batch."""

    router_id: str
    revision: int
    source: str
    dropped: int
    in_flight: dict[str, int]
    age_s: float


class TelemetryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tick, complete. None is unknown; durations in seconds, `at_s` on the epoch.

    reason:           of the regime, in words
    applied:          what became of the tick's wish to change parameters
    wanted_*:         what the policy would set, whether or not it may
    ttft_average_s:   the moving average of P99 that is compared with the thresholds
    poa_low, _high:   95 % interval of poa_hat
    poa_shares:       where the cost beyond an unloaded system comes from
    poa_by_role:      per leg; `poa_reason` names what an absent one lacks; `poa_legs` says all of each
    poa_frozen*:      the paper's own estimate, on decisions; another series, never to be mixed with poa_hat
    stragglers:       workers that are slower than their pool by more than the configured factor
    driver:           what the regime is needed for: `<role>.<resource>`, `ttft`, `refusals`, empty in `below`
    bottleneck:       the pool that limits, `upstream` of the workers, or empty
    poa_slope:        of PoA-hat over the last 30 s, per second
    curvature:        share of TTFT P50 that is quadratic in load
    iteration_*:      by role: time of a decode iteration now, and without load
    in_flight:        requests, over all legs
    censored:         so many requests were refused that TTFT and PoA-hat speak of the survivors only
    cache_signal:     whether workers differ in what they hold of a prompt; where they do not, ω moves nothing
    cache_hit_frac:   share of prompt tokens found cached, of the recent decisions
    swaps:            changes of τ or ω that reached the channel since the controller started
    params_refused:   records in the store that were not taken, by reason
    messages_*:       of the event plane, cumulative, by topic and by reason; among the reasons is also what
                      the controller itself could not send, store, read, keep or price (loop.py names them)
    message_age_s:    since the last message of any kind
    tick_s:           computing time of the tick before
    """

    tick: int
    at_s: float
    namespace: str
    mode: Mode
    regime: Regime
    reason: str
    applied: Applied
    router_temperature: float
    overlap_weight: float
    revision: int
    kind: ParamsKind
    wanted_router_temperature: float
    wanted_overlap_weight: float
    dwell_left_s: float = 0.0
    pin_left_s: float | None = None
    poa_hat: float | None = None
    poa_low: float | None = None
    poa_high: float | None = None
    poa_shares: Shares | None = None
    poa_by_role: dict[str, float] = {}
    poa_legs: dict[str, Estimate] = {}
    poa_samples: int = 0
    poa_method: str = "marginal"
    poa_reason: str = ""
    poa_frozen: float | None = None
    poa_frozen_by_role: dict[str, float] = {}
    stragglers: tuple[WorkerLatency, ...] = ()
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_samples: int = 0
    ttft_source: str = "none"
    ttft_average_s: float | None = None
    baseline_s: float | None = None
    theta1_s: float | None = None
    theta2_s: float | None = None
    in_flight: int | None = None
    arrival_rate: float | None = None
    shed_frac: float = 0.0
    censored: bool = False
    cache_signal: CacheSignal = CacheSignal.UNKNOWN
    cache_hit_frac: float | None = None
    pools: dict[str, PoolLoad] = {}
    pool_regimes: dict[str, PoolRegime] = {}
    driver: str = ""
    bottleneck: str = ""
    poa_slope: float | None = None
    curvature: float | None = None
    iteration_s: dict[str, float] = {}
    iteration_baseline_s: dict[str, float] = {}
    routers: tuple[RouterView, ...] = ()
    requests_ended: dict[str, int] = {}
    params_refused: dict[str, int] = {}
    messages_received: dict[str, int] = {}
    messages_dropped: dict[str, int] = {}
    message_rate: float | None = None
    message_age_s: float | None = None
    bus_connected: bool = False
    regime_changes: int = 0
    swaps: int = 0
    failed_ticks: int = 0
    tick_s: float = 0.0


class Sink(Protocol):
    """Where records go. A sink that cannot deliver drops and counts; it never raises."""

    dropped: int

    async def emit(self, record: TelemetryRecord) -> None:
        """Take one record."""
        ...


class LogSink:
    """One line per tick."""

    def __init__(self, log: Any) -> None:
        self.dropped = 0
        self._log = log

    async def emit(self, record: TelemetryRecord) -> None:
        """Write the record as `poa.tick`."""
        self._log.info(TICK, **msgspec.to_builtins(record))


class BusSink:
    """`poa.<namespace>.telemetry`, msgpack. Nobody waits for it, so what cannot be sent is gone."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self.dropped = 0
        self._bus = bus
        self._subject = subject(namespace, "telemetry")

    async def emit(self, record: TelemetryRecord) -> None:
        """Publish the record."""
        try:
            await self._bus.publish(self._subject, msgspec.msgpack.encode(record))
        except BusError:
            self.dropped += 1


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
        self.registry.register(self)

    async def emit(self, record: TelemetryRecord) -> None:
        """Take one record."""
        self._record = record
        self._outcomes[record.applied] += 1

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
    upstream = record.bottleneck == "upstream"
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
        ("poa_params_swaps", "changes of τ or ω", record.swaps),
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


class MetricsServer:
    """/metrics and /health on loopback.

    port:  the one listened on, also when 0 was asked for

    Raises:  ConfigError on entering, when the port is in use; it names `key`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        port: int,
        ready: Callable[[], bool],
        *,
        key: str = "PoaController.metrics_port",
    ) -> None:
        self.port = port
        self._registry = registry
        self._ready = ready
        self._key = key
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            what = "is in use" if error.errno == errno.EADDRINUSE else error.strerror
            problem = f"{self._key} = {self.port}: must be a free port on 127.0.0.1, this one {what}"
            raise ConfigError([problem]) from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def _health(self, request: web.Request) -> web.Response:
        ready = self._ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)


def configure_logging(level: str) -> None:
    """Write structured lines to standard error: JSON, or for a terminal's eyes when it is one."""
    terminal = sys.stderr.isatty()
    last: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if terminal
        else [structlog.processors.format_exc_info, exact_numbers, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # one write a line, its end included: Dynamo's own threads write to the same pipe
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def exact_numbers(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Turn whole numbers that JSON readers would round into decimal text (E4)."""
    return {key: _exact(value) for key, value in event.items()}


def _exact(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_JSON_INT:
        return str(value)
    if isinstance(value, dict):
        return {str(_exact(key)): _exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(inner) for inner in value]
    return value
