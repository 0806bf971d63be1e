"""What Dynamo's planner is told of the split between prefill and decode: the controller's advice.

Owns: hearing the controller's telemetry, when its word is good, putting it into the planner's words.
Does not own: the advice (dynamo_poa/advice.py); scaling, limits and budgets, which are the planner's.
Invariant: no opinion on any doubt: nothing heard of late, no advice, workers on the move, or another split
           than the one the advice is about. As many workers in all as before.
Source: host: dynamo/planner/plugins of 1.4.2: types.py, orchestrator/in_process_loader.py and pipeline.py,
        merge/type_aware.py, transport/. How it is configured and what it was tested on: docs/planner.md.
"""

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
from dynamo.planner.plugins.types import (
    AcceptResult,
    BootstrapRequest,
    BootstrapResponse,
    ComponentTarget,
    OverrideResult,
    OverrideType,
    PipelineContext,
    ProposeStageRequest,
    ProposeStageResponse,
    ReconcileStageRequest,
    ReconcileStageResponse,
)

from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock, SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.coupling import Advice
from dynamo_poa.errors import ConfigError
from dynamo_poa.wire import subject

if TYPE_CHECKING:
    import grpc

MAX_AGE_S = 10.0  # a controller speaks every tick, and a tick is rarely more than a second
CLOSE_S = 0.5


class Told(msgspec.Struct, frozen=True):
    """What of a telemetry record counts here."""

    poa_advice: Advice | None = None


class PoaAdvice:
    """A plugin of the stages `propose` and `reconcile`; the planner's loader makes it with its `kwargs`.

    unreadable:  messages that were no telemetry, such as another version's
    """

    def __init__(
        self,
        namespace: str = "poa",
        nats_url: str = "nats://127.0.0.1:4222",
        max_age_s: float = MAX_AGE_S,
        clock: Clock | None = None,
    ) -> None:
        """Listen to nothing yet: that needs a running loop.

        Raises:  ConfigError for a namespace that is none.
        """
        CommonConfig(namespace=namespace)
        self.unreadable = 0
        self._clock = clock or SystemClock()
        self._subject = subject(namespace, "telemetry")
        self._nats_url = nats_url
        self._max_age_s = max_age_s
        self._told = Told()
        self._heard_at_s: float | None = None
        self._bus: Bus | None = None

    async def Bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Begin to listen; the planner calls this before its first tick."""
        await self._listen()
        return BootstrapResponse(ok=True)

    async def Propose(self, request: ProposeStageRequest) -> ProposeStageResponse:
        """Return the advised split, or that whatever the planner does is well."""
        await self._listen()  # a plugin that registers late is not bootstrapped
        advised = self._advised(request.context)
        if advised is None:
            return ProposeStageResponse(accept=AcceptResult())
        return ProposeStageResponse(override=advised)

    async def Reconcile(self, request: ReconcileStageRequest) -> ReconcileStageResponse:
        """Return the advised split where no other plugin wants another, or that theirs is well."""
        await self._listen()
        advised = self._advised(request.context)
        if advised is None or any(proposal.override is not None for proposal in request.proposals):
            return ReconcileStageResponse(accept=AcceptResult())
        return ReconcileStageResponse(override=advised)

    def take(self, _subject: str, data: bytes) -> None:
        """Take in one message from the telemetry subject."""
        try:
            self._told = msgspec.msgpack.decode(data, type=Told)
        except (msgspec.DecodeError, RecursionError):
            self.unreadable += 1
            return
        self._heard_at_s = self._clock.monotonic_s()

    async def aclose(self) -> None:
        """Listen no more; the planner itself has no such call and just ends."""
        if self._bus is not None:
            bus, self._bus = self._bus, None
            await bus.__aexit__(None, None, None)

    async def _listen(self) -> None:
        if self._bus is None:
            self._bus = Bus(self._nats_url, name="dynamo-poa planner plugin", clock=self._clock)
            self._bus.subscribe(self._subject, self.take)
            await self._bus.__aenter__()  # does not wait for the server

    def _advised(self, context: PipelineContext | None) -> OverrideResult | None:
        advice = self._told.poa_advice
        if advice is None or self._heard_at_s is None:
            return None
        if self._clock.monotonic_s() - self._heard_at_s > self._max_age_s:
            return None
        seen = context.observations.workers if context and context.observations else None
        if seen is None or seen.prefill_scaling_in_progress or seen.decode_scaling_in_progress:
            return None
        now, then = advice.now.split, advice.then.split
        if (seen.ready_prefill, seen.ready_decode) != (now.prefill, now.decode):
            return None
        targets = [
            ComponentTarget(sub_component_type=pool, replicas=count, type=OverrideType.SET)
            for pool, count in (("prefill", then.prefill), ("decode", then.decode))
        ]
        return OverrideResult(targets=targets, reason=f"dynamo-poa: {advice}")


async def start_server(plugin: PoaAdvice, listen: str) -> "tuple[grpc.aio.Server, int]":
    """Serve the plugin to a planner in another process; return the server and its port.

    Args:    listen: as gRPC has it, such as 127.0.0.1:9099 or unix:/run/poa.sock.
    Raises:  OSError when that is taken; ImportError without grpcio and protobuf, which Dynamo does not need.
    """
    import grpc
    from dynamo.planner.plugins._proto_bridge import proto_to_pydantic, pydantic_to_proto
    from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as stubs

    class Propose(stubs.ProposePluginServicer):  # type: ignore[misc]
        async def Propose(self, request: object, context: object) -> object:
            return pydantic_to_proto(await plugin.Propose(proto_to_pydantic(request)))

    class Reconcile(stubs.ReconcilePluginServicer):  # type: ignore[misc]
        async def Reconcile(self, request: object, context: object) -> object:
            return pydantic_to_proto(await plugin.Reconcile(proto_to_pydantic(request)))

    class Lifecycle(stubs.PluginLifecycleServicer):  # type: ignore[misc]
        async def Bootstrap(self, request: object, context: object) -> object:
            return pydantic_to_proto(await plugin.Bootstrap(proto_to_pydantic(request)))

    server = grpc.aio.server()
    stubs.add_ProposePluginServicer_to_server(Propose(), server)
    stubs.add_ReconcilePluginServicer_to_server(Reconcile(), server)
    stubs.add_PluginLifecycleServicer_to_server(Lifecycle(), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"--listen {listen}: cannot be listened on: {error}") from error
    await server.start()
    await plugin.Bootstrap(BootstrapRequest())
    return server, port


async def _serve(plugin: PoaAdvice, listen: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server, port = await start_server(plugin, listen)
    sys.stdout.write(f"listening on {listen}, port {port}\n")
    sys.stdout.flush()
    await stop.wait()
    await server.stop(CLOSE_S)
    await plugin.aclose()


def main() -> None:
    """Read the command line and serve the plugin over gRPC until told to stop."""
    parser = argparse.ArgumentParser(prog="components.poa_planner", description="plugin for Dynamo's planner")
    parser.add_argument("--listen", required=True, help="gRPC address, such as 127.0.0.1:9099")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="NATS server of the graph")
    parser.add_argument("--namespace", default="poa", help="namespace of the graph")
    arguments = parser.parse_args()
    try:
        asyncio.run(_serve(PoaAdvice(arguments.namespace, arguments.nats), arguments.listen))
    except (OSError, ImportError, ConfigError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
