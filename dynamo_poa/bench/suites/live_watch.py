"""What a live graph says of itself while a cell is measured: workers' passes, decisions, ticks.

Owns: prompt tokens that workers computed, requests by worker, the controller's record over time.
Does not own: what clients see (live_client.py), the figures (live.py).
Invariant: the same is heard under every policy as far as it is said: forward passes are the workers' own, so
           the cached share is measured in one way for all. Nothing is counted before `count`.
"""

from collections import Counter

import msgspec
import structlog

from dynamo_poa.bench.suites.cells import Point
from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import WireError
from dynamo_poa.serve.plan import Plan
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.wire import Chosen, DecisionBatch, ForwardPass, decode_dynamo, subject

POINT_S = 1.0  # between two points of a series
PASSES = "forward-pass-metrics"

log = structlog.get_logger()


class Watch:
    """Listens to one graph.

    computed:   prompt tokens computed, by component (`prefill`, `backend`)
    chosen:     the plugin's decisions, by worker id, until `end`
    latest:     the controller's last record, None where there is no controller
    points:     the series, until `end`
    phase:      name that points get
    """

    def __init__(self, bus: Bus, plan: Plan, plugin: bool, clock: Clock) -> None:
        self.computed, self.chosen = Counter[str](), Counter[int]()
        self.latest: TelemetryRecord | None = None
        self.points: list[Point] = []
        self.phase = ""
        self._clock, self._ended = clock, False
        self._counted_from_s: float | None = None
        self._records = msgspec.msgpack.Decoder(TelemetryRecord).decode
        self._batches = msgspec.msgpack.Decoder(DecisionBatch).decode
        common = plan.sections["Common"]
        assert isinstance(common, CommonConfig)
        workers = common.worker_namespace if plugin else common.namespace
        bus.subscribe(f"namespace.{workers}.component.*.endpoint.generate.{PASSES}", self._pass)
        if plugin:
            bus.subscribe(subject(plan.namespace, "telemetry"), self._telemetry)
            bus.subscribe(subject(plan.namespace, "decisions"), self._decisions)

    def count(self) -> None:
        """Begin to count, and the series, now."""
        self.computed.clear()
        self.chosen.clear()
        self.points.clear()
        self._counted_from_s = self._clock.monotonic_s()

    def end(self) -> None:
        """Leave out decisions and points from now on; what was computed goes on being counted."""
        self._ended = True

    def _pass(self, at: str, data: bytes) -> None:
        if self._counted_from_s is None:
            return
        try:
            message = decode_dynamo(at, data)
        except WireError as error:
            log.warning("bench.pass.dropped", reason=error.reason)
            return
        if isinstance(message.body, ForwardPass):
            self.computed[message.component] += message.body.prefill_tokens

    def _decisions(self, _: str, data: bytes) -> None:
        if self._counted_from_s is not None and not self._ended:
            batch = self._batches(data)
            self.chosen.update(event.worker_id for event in batch.events if isinstance(event, Chosen))

    def _telemetry(self, _: str, data: bytes) -> None:
        self.latest = record = self._records(data)
        if self._counted_from_s is None or self._ended:
            return
        at_s = self._clock.monotonic_s() - self._counted_from_s
        if not self.points or at_s - self.points[-1].at_s >= POINT_S or self.phase != self.points[-1].phase:
            self.points.append(
                Point(
                    at_s=round(at_s, 3),
                    phase=self.phase,
                    regime=record.regime,
                    poa_hat=record.poa_hat,
                    poa_caching=record.caching.poa_hat,
                    duplication=record.caching.duplication,
                    ttft_p99_s=record.ttft_p99_s,
                    router_temperature=record.router_temperature,
                    overlap_weight=record.overlap_weight,
                )
            )
