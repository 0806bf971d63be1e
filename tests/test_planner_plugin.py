"""Our plugin under Dynamo's planner: its types, its loader, its registry, its pipeline, its merge.

Dynamo 1.4.2 ships the planner and not all that it imports. What needs packages beyond Dynamo's own (the
engine adapter, gRPC) is skipped without them; docs/planner.md says how to run everything.
"""

import asyncio
import re
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.plugins.clock import VirtualClock
from dynamo.planner.plugins.merge import type_aware_merge
from dynamo.planner.plugins.merge.types import ComponentKey, PluginResult
from dynamo.planner.plugins.registry.auth import AllowUnauthenticatedAuth
from dynamo.planner.plugins.registry.circuit_breaker import CircuitBreaker
from dynamo.planner.plugins.registry.config import InProcessPluginSpec
from dynamo.planner.plugins.registry.server import PluginRegistryServer
from dynamo.planner.plugins.scheduler import PluginScheduler
from dynamo.planner.plugins.transport.config import TransportConfig, make_transport_for_endpoint
from dynamo.planner.plugins.types import (
    AcceptResult,
    BootstrapRequest,
    ComponentTarget,
    ConstrainStageResponse,
    ObservationData,
    OverrideResult,
    OverrideType,
    PipelineContext,
    ProposeResult,
    ProposeStageRequest,
    ProposeStageResponse,
    ReconcileStageRequest,
    WorkerState,
)
from nats_server import NatsServer
from records import RECORD

from components.poa_planner import PoaAdvice, main, start_server
from dynamo_poa.bus import Bus
from dynamo_poa.clock import ManualClock, SystemClock
from dynamo_poa.coupling import Advice, Attainment, Split
from dynamo_poa.errors import ConfigError
from dynamo_poa.telemetry import BusSink

ADVICE = Advice(
    now=Attainment(split=Split(3, 5), ttft_frac=0.91, itl_frac=0.99, goodput_rps=18.0),
    then=Attainment(split=Split(4, 4), ttft_frac=0.98, itl_frac=0.98, goodput_rps=19.25),
    gain_frac=0.07,
    gain_low=0.03,
    gain_high=0.11,
    held_s=75.0,
)
BASELINE = {ComponentKey(sub_component_type="prefill"): 3, ComponentKey(sub_component_type="decode"): 5}
SPEC = {
    "module": "components.poa_planner",
    "class": "PoaAdvice",
    "plugin_id": "dynamo_poa",
    "plugin_type": "propose",
    "priority": 5,
    "needs": ["observations.workers"],
    "kwargs": {"namespace": "poa", "nats_url": "nats://127.0.0.1:1"},
}


def telemetry(advice: Advice | None = ADVICE) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(RECORD, poa_advice=advice))


def seen(prefill: int | None = 3, decode: int | None = 5, **more: bool) -> PipelineContext:
    workers = WorkerState(ready_prefill=prefill, ready_decode=decode, **more)
    return PipelineContext(observations=ObservationData(workers=workers))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def plugin(clock: ManualClock) -> AsyncIterator[PoaAdvice]:
    """A plugin that has just heard of advice; nobody listens at its server's port."""
    made = PoaAdvice(nats_url="nats://127.0.0.1:1", clock=clock)
    made.take("", telemetry())
    yield made
    await made.aclose()


async def proposed(plugin: PoaAdvice, context: PipelineContext | None) -> dict[str, int] | None:
    answer = await plugin.Propose(ProposeStageRequest(context=context))
    assert (answer.accept is None) is (answer.override is not None)
    assert answer.final is False  # others may still be heard, and budgets count
    return None if answer.override is None else replicas(answer.override.targets)


def replicas(targets: list[ComponentTarget]) -> dict[str, int]:
    return {target.sub_component_type: target.replicas for target in targets}


# What it says


async def test_advice_is_proposed_as_the_replicas_of_both_pools(plugin: PoaAdvice) -> None:
    """The planner's own types check it; the reason is what an operator reads."""
    answer = await plugin.Propose(ProposeStageRequest(context=seen()))
    reason = "dynamo-poa: 3P/5D → 4P/4D: TTFT attainment 91 → 98 %, ITL 99 → 98 %, goodput +7 % (+3 to +11)"
    assert answer == ProposeStageResponse(
        override=OverrideResult(
            targets=[
                ComponentTarget(sub_component_type="prefill", replicas=4, type=OverrideType.SET),
                ComponentTarget(sub_component_type="decode", replicas=4, type=OverrideType.SET),
            ],
            reason=reason,
        )
    )


async def test_without_advice_there_is_no_opinion(plugin: PoaAdvice) -> None:
    """Most of the time."""
    plugin.take("", telemetry(None))
    assert await proposed(plugin, seen()) is None


@pytest.mark.parametrize(
    "context",
    [
        None,
        PipelineContext(),
        seen(None, None),
        seen(4, 4),
        seen(3, 4),
        seen(prefill_scaling_in_progress=True),
        seen(decode_scaling_in_progress=True),
    ],
)
async def test_advice_on_another_split_or_moving_workers_is_not_passed_on(
    plugin: PoaAdvice, context: PipelineContext | None
) -> None:
    """Else what was advised for 3P/5D would be said once more while 4P/4D comes up, or of another fleet."""
    assert await proposed(plugin, context) is None


async def test_advice_ages(plugin: PoaAdvice, clock: ManualClock) -> None:
    """A controller that is gone advises nothing; one that speaks again does."""
    await clock.advance(10.0)
    assert await proposed(plugin, seen()) == {"prefill": 4, "decode": 4}
    await clock.advance(0.5)
    assert await proposed(plugin, seen()) is None
    plugin.take("", telemetry())
    assert await proposed(plugin, seen()) == {"prefill": 4, "decode": 4}


async def test_what_is_no_telemetry_is_counted_and_refreshes_nothing(
    plugin: PoaAdvice, clock: ManualClock
) -> None:
    """Another version's record, or rubbish."""
    await clock.advance(10.5)
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"poa_advice": 7})):
        plugin.take("", data)
    assert plugin.unreadable == 3
    assert await proposed(plugin, seen()) is None


def test_a_namespace_that_is_none_is_refused() -> None:
    """A wildcard would hear the controllers of others."""
    with pytest.raises(ConfigError):
        PoaAdvice(namespace="*")


async def test_beside_the_planners_own_proposal_it_has_no_opinion_in_reconcile(plugin: PoaAdvice) -> None:
    """Half of ours and half of theirs would be a split that nobody priced."""
    theirs = OverrideResult(targets=[ComponentTarget(sub_component_type="decode", replicas=6)])
    idle = ProposeResult(plugin_id="builtin_throughput_propose", accept=AcceptResult())
    busy = ProposeResult(plugin_id="builtin_load_propose", override=theirs)
    alone = await plugin.Reconcile(ReconcileStageRequest(context=seen(), proposals=[idle]))
    beside = await plugin.Reconcile(ReconcileStageRequest(context=seen(), proposals=[idle, busy]))
    assert alone.override is not None
    assert replicas(alone.override.targets) == {"prefill": 4, "decode": 4}
    assert beside.accept is not None


# What the planner makes of it


async def test_the_planners_merge_takes_it(plugin: PoaAdvice) -> None:
    """merge/type_aware.py: of two that set a pool, the smaller priority; a ceiling still holds."""
    ours = (await plugin.Propose(ProposeStageRequest(context=seen()))).override
    assert ours is not None
    other = OverrideResult(targets=[ComponentTarget(sub_component_type="decode", replicas=6)])
    at_most = ComponentTarget(sub_component_type="prefill", replicas=3, type=OverrideType.AT_MOST)

    def merged(*results: PluginResult) -> dict[str, int]:
        outcome = type_aware_merge(results, BASELINE)
        assert outcome.proposal is not None
        return replicas(outcome.proposal.targets)

    mine = PluginResult(plugin_id="dynamo_poa", priority=5, result=ours)
    assert merged(mine) == {"prefill": 4, "decode": 4}
    load = PluginResult(plugin_id="builtin_load_propose", priority=10, result=other)
    assert merged(mine, load) == {"prefill": 4, "decode": 4}
    first = PluginResult(plugin_id="builtin_load_propose", priority=1, result=other)
    assert merged(mine, first) == {"prefill": 4, "decode": 6}
    budget = PluginResult(plugin_id="budget", priority=1, result=OverrideResult(targets=[at_most]))
    assert merged(mine, budget) == {"prefill": 3, "decode": 4}


@pytest.fixture
def orchestration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The planner's orchestrator on its own registry, scheduler and clock, and its loader.

    Its package imports scikit-learn for curves that are not used here; where that is not installed an empty
    module stands in.
    """
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError:
        model = types.ModuleType("sklearn.linear_model")
        model.LinearRegression = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
        monkeypatch.setitem(sys.modules, "sklearn.linear_model", model)
    from dynamo.planner.plugins.orchestrator import in_process_loader, orchestrator

    clock = VirtualClock()
    breaker = CircuitBreaker(clock)
    transport = TransportConfig(request_timeout_seconds=5.0, allow_insecure_grpc=True)
    registry = PluginRegistryServer(
        clock=clock,
        auth=AllowUnauthenticatedAuth(),
        circuit_breaker=breaker,
        transport_factory=lambda plugin_id, endpoint, in_process_instance=None: make_transport_for_endpoint(
            plugin_id, endpoint, transport, in_process_instance=in_process_instance
        ),
    )
    made = orchestrator.LocalPlannerOrchestrator(
        registry=registry,
        scheduler=PluginScheduler(registry, breaker, clock),
        circuit_breaker=breaker,
        clock=clock,
    )
    return types.SimpleNamespace(orchestrator=made, load=in_process_loader.load_in_process_plugins)


async def loaded(orchestration: Any, **changes: object) -> PoaAdvice:
    """Have the planner load our plugin from its configuration and tell it of advice."""
    orchestration.load(orchestration.orchestrator, [InProcessPluginSpec.model_validate(SPEC | changes)])
    await orchestration.orchestrator.bootstrap_plugins()
    (registered,) = orchestration.orchestrator.registry.all_plugins()
    plugin: PoaAdvice = registered.transport._instance
    plugin.take("", telemetry())
    return plugin


@pytest.mark.parametrize("stage", ["propose", "reconcile"])
async def test_the_planners_pipeline_scales_to_the_advice(orchestration: Any, stage: str) -> None:
    """Loader, Bootstrap, registry, scheduler and the four stages, all the planner's own."""
    plugin = await loaded(orchestration, plugin_type=stage)
    outcome = await orchestration.orchestrator.tick(seen(), BASELINE)
    assert outcome.execute_action == "apply"
    assert replicas(outcome.final_proposal.targets) == {"prefill": 4, "decode": 4}
    plugin.take("", telemetry(None))
    outcome = await orchestration.orchestrator.tick(seen(), BASELINE)
    assert replicas(outcome.final_proposal.targets) == {"prefill": 3, "decode": 5}  # as it is: no change
    await plugin.aclose()


async def test_the_planners_limits_are_above_the_advice(orchestration: Any) -> None:
    """A plugin of the `constrain` stage, as a budget is."""

    class Budget:
        async def Constrain(self, request: object) -> ConstrainStageResponse:
            limit = ComponentTarget(sub_component_type="prefill", replicas=3, type=OverrideType.AT_MOST)
            return ConstrainStageResponse(override=OverrideResult(targets=[limit]))

    plugin = await loaded(orchestration)
    orchestration.orchestrator.register_internal("budget", "constrain", 1, Budget())
    outcome = await orchestration.orchestrator.tick(seen(), BASELINE)
    assert replicas(outcome.final_proposal.targets) == {"prefill": 3, "decode": 4}
    await plugin.aclose()


async def test_the_planners_engine_turns_it_into_a_scaling_decision(plugin: PoaAdvice) -> None:
    """The adapter `python -m dynamo.planner` runs, with its own configuration, beside its own scaling."""
    pytest.importorskip("pandas", reason="the planner's adapter needs packages that Dynamo does not install")
    from dynamo.planner.core.types import EngineCapabilities, TickInput, WorkerCapabilities, WorkerCounts
    from dynamo.planner.plugins.orchestrator.engine_adapter import OrchestratorEngineAdapter

    config = PlannerConfig.model_validate(
        {
            "environment": "virtual",
            "mode": "disagg",
            "backend": "mocker",
            "plugin_registration": {"in_process_plugins": [SPEC]},
        }
    )
    engine = EngineCapabilities(num_gpu=1, max_num_batched_tokens=8192, max_kv_tokens=16384)
    adapter = OrchestratorEngineAdapter(config, WorkerCapabilities(prefill=engine, decode=engine))
    await adapter.bootstrap_plugins()
    (registered,) = [
        one for one in adapter._orchestrator.registry.all_plugins() if one.plugin_id == "dynamo_poa"
    ]
    heard: PoaAdvice = registered.transport._instance

    async def decided(advice: Advice | None) -> object:
        heard.take("", telemetry(advice))
        counts = WorkerCounts(ready_num_prefill=3, ready_num_decode=5)
        effects = await adapter.tick(adapter.initial_tick(0.0), TickInput(now_s=5.0, worker_counts=counts))
        decision = effects.scale_to
        return None if decision is None else (decision.num_prefill, decision.num_decode)

    assert await decided(ADVICE) == (4, 4)
    assert await decided(None) is None
    await heard.aclose()
    await adapter.shutdown()


async def test_a_planner_in_another_process_reaches_it_over_grpc(
    orchestration: Any, plugin: PoaAdvice
) -> None:
    """Registered as an external plugin; requests and answers cross the wire as the planner's protobuf."""
    pytest.importorskip("grpc", reason="grpcio and protobuf are not among Dynamo's dependencies")
    from dynamo.planner.plugins.types import RegisterRequest

    server, port = await start_server(plugin, "127.0.0.1:0")
    answer = await orchestration.orchestrator.registry.register(
        RegisterRequest(
            plugin_id="dynamo_poa",
            plugin_type="propose",
            priority=5,
            endpoint=f"grpc://127.0.0.1:{port}",
            protocol_version="1.0",
        )
    )
    assert answer.accepted
    outcome = await orchestration.orchestrator.tick(seen(), BASELINE)
    assert replicas(outcome.final_proposal.targets) == {"prefill": 4, "decode": 4}
    await orchestration.orchestrator.shutdown()
    await server.stop(0)


# How it hears


async def test_it_hears_the_controllers_telemetry_over_nats(nats_server: NatsServer) -> None:
    """Published as the controller publishes it, heard as the planner's loader makes the plugin."""
    clock = SystemClock()
    plugin = PoaAdvice(nats_url=nats_server.url)
    await plugin.Bootstrap(BootstrapRequest())
    async with Bus(nats_server.url, name="controller", clock=clock) as bus:
        await bus.wait_connected(5.0)
        sink = BusSink(bus, "poa")
        record = msgspec.structs.replace(RECORD, poa_advice=ADVICE)
        assert await proposed(plugin, seen()) is None
        for _ in range(500):  # it connects meanwhile
            await sink.emit(record)
            if await proposed(plugin, seen()) is not None:
                break
            await asyncio.sleep(0.01)
    assert await proposed(plugin, seen()) == {"prefill": 4, "decode": 4}
    await plugin.aclose()


# How it is configured


def test_the_documented_configuration_is_the_planners() -> None:
    """Both examples of docs/planner.md pass the planner's own validation and name what is there."""
    text = (Path(__file__).parent.parent / "docs" / "planner.md").read_text()
    examples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    inside, outside = (PlannerConfig.model_validate({"mode": "disagg", **example}) for example in examples)
    (spec,) = inside.plugin_registration.in_process_plugins
    assert (spec.module, spec.class_) == (PoaAdvice.__module__, PoaAdvice.__name__)
    PoaAdvice(**spec.kwargs)
    (entry,) = outside.scheduling.external_plugins
    assert (entry.plugin_type, entry.priority, entry.needs) == (spec.plugin_type, spec.priority, spec.needs)
    assert outside.plugin_registration.transport.allow_insecure_grpc


def test_a_bad_command_line_ends_with_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for every component: status 2, no traceback."""
    monkeypatch.setattr(sys, "argv", ["poa_planner", "--listen", "127.0.0.1:0", "--namespace", "a.b"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    bound = "must be letters, digits, - and _ (it is one token of a subject)"
    assert capsys.readouterr().err == f"error: Common.namespace = 'a.b': {bound}\n"
