"""What is said of each tick and of each event, and where it goes.

Owns: the canonical record of a tick, names of log events, logging's set-up, the /metrics server.
Does not own: when a record is made (loop.py) or what is in it (report.py), what /metrics says of it
              (controller_metrics.py).
Invariant: one record, thin sinks: log line, event plane and /metrics say the same; numbers too large for a
           JSON number are text.
Source: cases O1 (port clash), E4 (identifiers past 2^53).
"""

import errno
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dynamo_poa.bus import Bus
from dynamo_poa.coupling import Advice, AllocationEstimate, CacheSwap, CachingEstimate, Coupling
from dynamo_poa.errors import BusError, ConfigError
from dynamo_poa.values import (
    Applied,
    CacheSignal,
    Estimate,
    Mode,
    ParamsKind,
    PoolLoad,
    PoolRegime,
    Regime,
    Selection,
    Setting,
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
POLICY_FAILED = "poa.policy.failed"
POLICY_RESUMED = "poa.policy.resumed"
ADVICE_GIVEN = "poa.advice.given"
ADVICE_WITHDRAWN = "poa.advice.withdrawn"
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
CACHES_ASKED = "poa.caches.asked"
RESYNC_ENDED = "poa.resync.ended"

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


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one tick.

    setting:              what it wants
    reason, detail:       why: a key of a small fixed set, and the same in words where there is more to say
    predicted_gain_frac:  predicted mean cost saved over what is in force, as a share of that; None where one
                          of both could not be priced
    disabled_left_s:      for so long it is not asked, because it failed; None while it is asked
    errors:               how often it has failed since the controller started
    """

    name: str
    setting: Setting
    reason: str
    detail: str = ""
    predicted_gain_frac: float | None = None
    disabled_left_s: float | None = None
    errors: int = 0


class TelemetryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tick, complete. None is unknown; durations in seconds, `at_s` on the epoch.

    reason:           of the regime, in words
    applied:          what became of the tick's wish to change parameters
    wanted_*:         what the policy would set, whether or not it may
    policy, shadow:   the policy whose word counts, and the one that is only asked beside it
    ttft_average_s:   the moving average of P99 that is compared with the thresholds
    poa_low, _high:   95 % interval of poa_hat
    poa_shares:       where the cost beyond an unloaded system comes from
    poa_by_role:      per leg; `poa_reason` names what an absent one lacks; `poa_legs` says all of each
    poa_frozen*:      the paper's own estimate, on decisions; another series, never to be mixed with poa_hat
    coupling:         the three games side by side, and where the inefficiency is
    caching, allocation:  the other two games, priced every `games_s`
    cache_swap:       how the caches followed the last change of ω
    poa_advice:       another split of the workers that is better beyond noise, and has been for a minute
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
    swaps:            changes of setting that reached the channel since the controller started
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
    prefill_load_scale: float | None = None
    selection: Selection = Selection.KV
    wanted_prefill_load_scale: float | None = None
    wanted_selection: Selection = Selection.KV
    policy: PolicyView | None = None
    shadow: PolicyView | None = None
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
    coupling: Coupling = Coupling()
    caching: CachingEstimate = CachingEstimate(reason="not priced yet")
    allocation: AllocationEstimate = AllocationEstimate(reason="not priced yet")
    cache_swap: CacheSwap | None = None
    poa_advice: Advice | None = None
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
