"""Fleets and policies become plans whose workers differ in nothing but what the fleet says."""

import pytest

from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, SlowWorker, Stall
from dynamo_poa.bench.suites.live import Block
from dynamo_poa.bench.suites.live_graphs import frontend_ports, plan_of, process_of, watches
from dynamo_poa.config import ControllerConfig, RouterConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.plan import Plan
from dynamo_poa.workloads.arrivals import Closed
from dynamo_poa.workloads.synthetic import Paper

AGGREGATED = Fleet(name="4A", prefill=0, decode=4, speedup=0.5, kv_blocks=512)
DISAGGREGATED = Fleet(name="1P/2D", prefill=1, decode=2, speedup=0.5)
NATIVE = Policy(name="kv", router_temperature=0.7, overlap_credit=0.5, prefill_load_scale=4, credit_decay=1)
OURS = Policy(name="ours", plugin="active")


def flags(plan: Plan, process: str) -> dict[str, str]:
    """Return the flags that a process is started with, and their values."""
    argv = next(p.argv for p in plan.processes if p.name == process)
    return {
        name.removeprefix("--"): "" if value.startswith("--") else value
        for name, value in zip(argv, (*argv[1:], "--"), strict=True)
        if name.startswith("--")
    }


def workers(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the flags of the workers' processes, but for what differs from graph to graph."""
    names = [p.name for p in plan.processes if p.name.startswith(("prefill", "decode", "worker"))]
    own = ("model-path", "endpoint", "bootstrap-ports")
    return {
        name: {key: value for key, value in flags(plan, name).items() if key not in own} for name in names
    }


def test_the_natives_frontend_routes_as_the_policy_says() -> None:
    """`python -m dynamo.frontend --help`, 1.4.2."""
    found = flags(plan_of(AGGREGATED, NATIVE, 20), "frontend")
    assert {key: found[key] for key in found if key.startswith("router")} == {
        "router-mode": "kv",
        "router-temperature": "0.7",
        "router-kv-overlap-score-credit": "0.5",
        "router-kv-overlap-score-credit-decay": "1",
        "router-prefill-load-scale": "4",
    }
    assert "no-router-replica-sync" in found
    found = flags(plan_of(AGGREGATED, Policy(name="p2c", router_mode="power-of-two"), 20), "frontend")
    assert {key: found[key] for key in found if "router" in key} == {"router-mode": "power-of-two"}


def test_ours_has_the_policys_statics_mode_and_table() -> None:
    """Contract: cells.Policy."""
    policy = Policy(name="s", plugin="shadow", router_temperature=0.3, prefill_load_scale=2, table="static")
    sections = plan_of(AGGREGATED, policy, 12).sections
    router, controller = sections["PoaRouter"], sections["PoaController"]
    assert isinstance(router, RouterConfig)
    assert isinstance(controller, ControllerConfig)
    assert (router.router_temperature, router.overlap_key, router.overlap_weight) == (
        0.3,
        "prefill_load_scale",
        2,
    )
    assert (controller.mode, controller.policy.name, controller.estimate_window_s) == ("shadow", "static", 12)
    assert (router.legs, router.min_decode_workers) == (("aggregated",), 4)


@pytest.mark.parametrize(
    "fleet",
    [
        AGGREGATED,
        DISAGGREGATED,
        Fleet(
            name="slow and stalling",
            prefill=1,
            decode=4,
            host_blocks=256,
            slow=(SlowWorker(role="decode", number=3, factor=5),),
            stall=Stall(role="decode", number=1, stall_s=2, period_s=6),
        ),
    ],
    ids=lambda fleet: fleet.name,
)
def test_workers_are_started_alike_under_every_policy(fleet: Fleet) -> None:
    """Pairing: cells that differ in their policy have the same fleet."""
    assert workers(plan_of(fleet, NATIVE, 20)) == workers(plan_of(fleet, OURS, 20))


def test_a_slow_and_a_stalling_worker_have_processes_of_their_own() -> None:
    """A slow one takes `factor` times as long; a stalled one must not stop others."""
    fleet = Fleet(
        name="h",
        prefill=0,
        decode=5,
        speedup=0.5,
        host_blocks=256,
        slow=(SlowWorker(role="aggregated", number=4, factor=5),),
        stall=Stall(role="aggregated", number=1, stall_s=2, period_s=6),
    )
    plan = plan_of(fleet, NATIVE, 20)
    speeds = {
        name: (found["num-workers"], found["speedup-ratio"], found["num-g2-blocks"])
        for name, found in workers(plan).items()
    }
    assert speeds == {
        "worker-0": ("1", "0.5", "256"),
        "worker-1": ("1", "0.5", "256"),
        "worker-2": ("2", "0.5", "256"),
        "worker-3": ("1", "0.1", "256"),
    }
    assert [process_of(plan, "aggregated", number) for number in range(5)] == [
        "worker-0",
        "worker-1",
        "worker-2",
        "worker-2",
        "worker-3",
    ]


def test_native_replicas_are_frontends_and_ours_are_routers() -> None:
    """Issue 5: 1, 2 and 4 router replicas, with and without Dynamo's replica sync."""
    fleet = Fleet(name="4A x4", prefill=0, decode=4, routers=4, replica_sync=True)
    native, ours = plan_of(fleet, NATIVE, 20), plan_of(fleet, OURS, 20)
    frontends = [p.name for p in native.processes if p.name.startswith("frontend")]
    assert frontends == ["frontend", "frontend-1", "frontend-2", "frontend-3"]
    found = [flags(native, name) for name in frontends]
    assert [int(flag["http-port"]) for flag in found] == frontend_ports(native)
    assert len(set(frontend_ports(native))) == 4
    assert all("router-replica-sync" in flag for flag in found)
    assert [p.name for p in ours.processes if p.name.startswith("router")] == [
        f"router-{n}" for n in range(4)
    ]
    assert len(frontend_ports(ours)) == 1
    router = ours.sections["PoaRouter"]
    assert isinstance(router, RouterConfig)
    assert router.replica_sync


@pytest.mark.parametrize(
    ("fleet", "policy", "problem"),
    [
        (
            AGGREGATED,
            Policy(name="x", plugin="active", router_mode="random"),
            "policy 'x': router_mode = 'random': must be 'kv' with the plugin",
        ),
        (
            AGGREGATED,
            Policy(name="x", router_mode="round-robin", router_temperature=0.5),
            "policy 'x': router_temperature = 0.5: must be left alone in round-robin mode",
        ),
        (
            AGGREGATED,
            Policy(name="x", plugin="active", credit_decay=1),
            "policy 'x': credit_decay = 1: must be 0, the plugin does not set it",
        ),
        (
            AGGREGATED,
            Policy(name="x", plugin="active", prefill_load_scale=4.0),
            "PoaRouter.overlap_weight = 4.0: must be in [0, 2]",
        ),
        (
            AGGREGATED,
            Policy(name="x", plugin="active", overlap_credit=0.5, prefill_load_scale=2),
            "policy 'x': overlap_credit = 0.5 and prefill_load_scale = 2: "
            "one must be 1, the plugin's ω is one of them",
        ),
        (
            Fleet(name="f", prefill=0, decode=4, slow=(SlowWorker(role="decode", number=0, factor=3),)),
            OURS,
            "fleet 'f': decode-0: must be one of its workers (0 prefill, 4 aggregated)",
        ),
        (
            Fleet(name="f", prefill=1, decode=4, stall=Stall(role="decode", number=4, stall_s=2, period_s=6)),
            OURS,
            "fleet 'f': decode-4: must be one of its workers (1 prefill, 4 decode)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(fleet: Fleet, policy: Policy, problem: str) -> None:
    """Style: bad input is refused, never repaired."""
    with pytest.raises(ConfigError) as refused:
        plan_of(fleet, policy, 20)
    assert refused.value.problems == (problem,)


def test_a_graphs_watches_of_discovery_are_those_of_its_routers_frontends_and_controller() -> None:
    """Beyond the kernel's limit a process sees no worker, and says nothing of it."""
    fleet = Fleet(name="4 routers", prefill=2, decode=4, routers=4)
    assert watches(plan_of(fleet, Policy(name="kv"), 20)) == 4 * 8
    assert watches(plan_of(fleet, OURS, 20)) == 4 * 8 + 8 + 4


async def test_a_graph_beyond_the_kernels_watches_is_refused_by_the_limits_name() -> None:
    """Its cells fail at once with what to set; it does not time out, and takes nothing from the others."""
    async with Block(AGGREGATED, (OURS,), most=19) as block:
        cell = Cell(
            suite="test",
            engine="live",
            fleet=AGGREGATED,
            content=Paper(),
            load=Closed(users=1),
            policy=OURS,
            seed=1,
            seconds=1.0,
        )
        result = await block.run(cell)
    assert (result.state, result.figures) == ("failed", {})
    assert "fs.inotify.max_user_instances = 19: must be >= 20" in result.reason
