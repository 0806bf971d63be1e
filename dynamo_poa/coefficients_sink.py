"""When routers are told what marginal cost is computed from, and what that is at the moment.

Owns: composing the message on `poa.<namespace>.coefficients`; that it goes out on every tick while the plugin
      is to select by it, and not otherwise.
Does not own: the latency models (latency.py), the message (wire.py), what routers make of it.
Invariant: what is not known is left out or None; what cannot be sent is counted, the next tick sends anew.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import BusError
from dynamo_poa.load import WorkerState
from dynamo_poa.output_tokens import OutputTokens, decoded_requests
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Curve, Role, Selection, WorkerKey, WorkerLatency
from dynamo_poa.wire import Coefficients, PoolSpeed, WorkerSpeed, subject


class CoefficientsSink:
    """Tells the routers; a sink, because it is asked once a tick."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        controller_id: str,
        clock: Clock,
        *,
        decisions: DecisionLog,
        output_tokens: OutputTokens,
        workers: Callable[[], Iterable[WorkerState]],
        latencies: Callable[[], Mapping[WorkerKey, WorkerLatency]],
        pools: Callable[[], Mapping[Role, Curve]],
    ) -> None:
        self.dropped = 0
        self._bus, self._clock = bus, clock
        self._subject = subject(namespace, "coefficients")
        self._controller_id = controller_id
        self._decisions, self._output_tokens = decisions, output_tokens
        self._workers, self._latencies, self._pools = workers, latencies, pools
        self._revision = 0

    async def emit(self, record: TelemetryRecord) -> None:
        """Send what is known now if the setting in force asks for it."""
        self._output_tokens.update(self._clock.monotonic_s(), decoded_requests(self._decisions.outcomes))
        pools = self._pools()
        if record.selection is not Selection.MARGINAL or not pools:
            return  # who knows nothing, just started, does not overwrite what a predecessor has told
        # By the wall clock, so that it grows over a restart too, also under the same process id.
        self._revision = max(self._revision + 1, int(self._clock.wall_s() * 1000))
        latencies, means = self._latencies(), self._output_tokens.mean
        message = Coefficients(
            controller_id=self._controller_id,
            revision=self._revision,
            sent_at_s=self._clock.wall_s(),
            routers=len(record.routers),
            pools={
                role: PoolSpeed(curve=of, output_tokens_mean=means.get(role)) for role, of in pools.items()
            },
            workers=tuple(
                speed_of(worker, latencies[worker.key])
                for worker in self._workers()
                if worker.key in latencies
            ),
        )
        try:
            await self._bus.publish(self._subject, msgspec.msgpack.encode(message))
        except BusError:
            self.dropped += 1


def speed_of(worker: WorkerState, latency: WorkerLatency) -> WorkerSpeed:
    """Return what routers are told of one rank."""
    waiting = (worker.queued_requests, worker.running_prefill_requests)
    return WorkerSpeed(
        worker_id=worker.key.worker_id,
        dp_rank=worker.key.dp_rank,
        curve=latency.curve,
        samples=latency.samples,
        running_requests=worker.decoding_requests,
        kv_tokens=worker.decoding_kv_tokens,
        queued_requests=None if waiting[0] is None or waiting[1] is None else waiting[0] + waiting[1],
        queued_prefill_tokens=worker.queued_prefill_tokens,
    )
