"""Which graph serves a fleet under a policy, and what its workers are called.

Owns: the translation of a fleet and a policy into a plan; what of them no live graph can do; workers' names.
Does not own: serving (serve/), load and figures (live.py), stalls (stalls.py).
Invariant: under every policy the workers of a fleet are started with the same flags. What cannot be served is
           refused before anything starts, never approximated.
Source: measured on Dynamo 1.4.2: all its router modes serve mock workers that hand over by bootstrap, also
        those whose help says that they fall back to the synchronous path; the decode worker prefills nothing.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from dynamo_poa.bench.processes import listening_ports
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import profiles
from dynamo_poa.bench.suites.cells import Fleet, Policy
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import ModelListed, Process
from dynamo_poa.serve.plan import FreePorts, Plan
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running
from dynamo_poa.values import Role

ESTIMATE_S = 0.5  # a snapshot of the requests in flight: PoA-hat's window of 20 s then holds 40
GAMES_S = 2.5  # priced in 0.05 s; a window of 10 s then holds four looks at the caches
WATCHES = (("frontend", 8), ("router", 8), ("controller", 4))
MOST_WATCHES = Path("/proc/sys/fs/inotify/max_user_instances")
_OURS = {True: "graphs.disagg_poa:Frontend", False: "graphs.agg_poa:Frontend"}
_NATIVE = {
    True: "dynamo_poa.bench.native_graph:Frontend",
    False: "dynamo_poa.bench.native_agg_graph:Frontend",
}


def plan_of(fleet: Fleet, policy: Policy, poa_window_s: float, chance: random.Random | None = None) -> Plan:
    """Lay out the graph that serves a fleet under a policy.

    Args:     poa_window_s: PoA-hat is that of the last so many seconds.
    Raises:   ConfigError listing what of them cannot be served.
    """
    if problems := [*_problems(fleet, policy)]:
        raise ConfigError(problems)
    overrides = ["Frontend.http_port=0", f"Common.block_size={fleet.block_tokens}", *_workers(fleet)]
    disagg = fleet.prefill > 0
    if policy.plugin:
        overrides += _plugin(fleet, policy, poa_window_s)
        return make_plan(_OURS[disagg], None, overrides, chance=chance)
    overrides.append(f"Frontend.args={_value(_router_flags(fleet, policy))}")
    if disagg:
        overrides.append("Common.handover=bootstrap")
    return _with_frontends(make_plan(_NATIVE[disagg], None, overrides, chance=chance), fleet.routers)


def watches(plan: Plan) -> int:
    """Return how many inotify instances a graph takes: each client of an endpoint watches discovery's folder.

    Source: measured, ai-dynamo 1.4.2: frontend and router 8, controller 4, workers none.
    """
    return sum(next((count for name, count in WATCHES if p.name.startswith(name)), 0) for p in plan.processes)


def watches_of(fleet: Fleet, policy: Policy) -> int:
    """Return the same of the graph that serves a fleet under a policy, before it is laid out."""
    count = dict(WATCHES)
    if not policy.plugin:
        return count["frontend"] * fleet.routers
    return count["frontend"] + count["router"] * fleet.routers + count["controller"]


def most_watches() -> int | None:
    """Return how many inotify instances the kernel lets a user have; None where it does not say."""
    try:
        return int(MOST_WATCHES.read_text())
    except (OSError, ValueError):
        return None


def _problems(fleet: Fleet, policy: Policy) -> Iterator[str]:
    kv_only = {
        "router_temperature": policy.router_temperature != 0,
        "overlap_credit": policy.overlap_credit != 1,
        "prefill_load_scale": policy.prefill_load_scale != 1,
        "credit_decay": policy.credit_decay != 0,
    }
    where = f"policy {policy.name!r}"
    if policy.plugin and policy.router_mode != "kv":
        yield f"{where}: router_mode = {policy.router_mode!r}: must be 'kv' with the plugin"
    if policy.router_mode != "kv":
        for key in (key for key, differs in kv_only.items() if differs):
            value = getattr(policy, key)
            yield f"{where}: {key} = {value:g}: must be left alone in {policy.router_mode} mode"
    if policy.plugin and policy.credit_decay:
        yield f"{where}: credit_decay = {policy.credit_decay:g}: must be 0, the plugin does not set it"
    if policy.plugin and policy.overlap_credit != 1 and policy.prefill_load_scale != 1:
        yield (
            f"{where}: overlap_credit = {policy.overlap_credit:g} and prefill_load_scale = "
            f"{policy.prefill_load_scale:g}: one must be 1, the plugin's ω is one of them"
        )
    pools = {"prefill": fleet.prefill, "decode" if fleet.prefill else "aggregated": fleet.decode}
    for one in (*fleet.slow, *([fleet.stall] if fleet.stall else ())):
        if not 0 <= one.number < pools.get(one.role, 0):
            has = ", ".join(f"{count} {role}" for role, count in pools.items())
            yield f"fleet {fleet.name!r}: {one.role}-{one.number}: must be one of its workers ({has})"


def _workers(fleet: Fleet) -> Iterator[str]:
    pools = {"PrefillWorker": ("prefill", fleet.prefill), "DecodeWorker": ("decode", fleet.decode)}
    if not fleet.prefill:
        pools = {"Worker": ("aggregated", fleet.decode)}
    for section, (role, count) in pools.items():
        yield f"{section}.workers={count}"
        yield f"{section}.per_process={count}"
        flags = _engine_flags(fleet)
        if role == "prefill" and fleet.prefill_at_once:
            flags["max-num-seqs"] = fleet.prefill_at_once
        yield f"{section}.args={_value(flags)}"
        factors = {slow.number: slow.factor for slow in fleet.slow if slow.role == role}
        if fleet.stall and fleet.stall.role == role:  # flags of its own, so that its process is its own
            factors.setdefault(fleet.stall.number, 1.0)
        if factors:
            own = {number: {"speedup-ratio": fleet.speedup / factor} for number, factor in factors.items()}
            yield f"{section}.args_of={_value(own)}"


def _engine_flags(fleet: Fleet) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "speedup-ratio": fleet.speedup,
        "num-gpu-blocks-override": fleet.kv_blocks,
        "max-num-seqs": fleet.max_num_seqs,
        "max-num-batched-tokens": fleet.max_num_batched_tokens,
    }
    if fleet.host_blocks:
        flags["num-g2-blocks"] = fleet.host_blocks
    if fleet.profile:
        flags["planner-profile-data"] = str(profiles.path_of(fleet.profile))
    return flags


def _router_flags(fleet: Fleet, policy: Policy) -> dict[str, Any]:
    flags: dict[str, Any] = {"router-mode": policy.router_mode}
    if policy.router_mode == "kv":
        flags |= {
            "router-temperature": policy.router_temperature,
            "router-kv-overlap-score-credit": policy.overlap_credit,
            "router-kv-overlap-score-credit-decay": policy.credit_decay,
            "router-prefill-load-scale": policy.prefill_load_scale,
            "router-replica-sync": fleet.replica_sync,
        }
    return flags


def _plugin(fleet: Fleet, policy: Policy, poa_window_s: float) -> Iterator[str]:
    yield f"PoaRouter.legs={'[prefill, decode]' if fleet.prefill else '[aggregated]'}"
    yield f"PoaRouter.min_decode_workers={fleet.decode}"
    if fleet.prefill:
        yield f"PoaRouter.min_prefill_workers={fleet.prefill}"
    yield f"PoaRouter.replicas={fleet.routers}"
    yield f"PoaRouter.replica_sync={str(fleet.replica_sync).lower()}"
    yield f"PoaRouter.router_temperature={policy.router_temperature}"
    scaled = policy.prefill_load_scale != 1
    yield f"PoaRouter.overlap_key={'prefill_load_scale' if scaled else 'overlap_score_credit'}"
    yield f"PoaRouter.overlap_weight={policy.prefill_load_scale if scaled else policy.overlap_credit}"
    yield f"PoaController.mode={policy.plugin}"
    yield f"PoaController.policy.name={policy.table}"
    yield f"PoaController.estimate_s={ESTIMATE_S}"
    yield f"PoaController.estimate_window_s={poa_window_s}"
    yield f"PoaController.games_s={GAMES_S}"
    yield f"PoaController.caching.demand_window_s={poa_window_s}"


def _value(mapping: dict[Any, Any]) -> str:
    return json.dumps(mapping)  # which is YAML


def _with_frontends(plan: Plan, count: int) -> Plan:
    """Add frontends beside the first: Dynamo's own routers are in them."""
    first = next(process for process in plan.processes if process.name == "frontend")
    ports, more = FreePorts(random.Random()), list[Process]()
    own_port = urlsplit(plan.http_url).port
    for number in range(1, count):
        port = ports(1)
        assert isinstance(first.ready, ModelListed)
        argv = [str(port) if text == str(own_port) else text for text in first.argv]
        url = _at_port(first.ready.url, port)
        ready = ModelListed(url, first.ready.model)
        more.append(msgspec.structs.replace(first, name=f"frontend-{number}", argv=tuple(argv), ready=ready))
    return msgspec.structs.replace(plan, processes=(*plan.processes, *more))


def _at_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.hostname}:{port}"))


def frontend_ports(plan: Plan) -> list[int]:
    """Return the ports that requests are to be spread over."""
    urls = [process.ready.url for process in plan.processes if isinstance(process.ready, ModelListed)]
    return [urlsplit(url).port or 80 for url in urls]


def process_of(plan: Plan, role: str, number: int) -> str:
    """Return the name of the process that a worker, by its number in the pool, runs in."""
    return next(process for process, first, count in _pool(plan, role) if first <= number < first + count)


def worker_names(running: Running, policy: Policy, fleet: Fleet) -> dict[int, str]:
    """Return what each worker that discovery lists is called: `prefill-0`, `decode-3`, `aggregated-1`.

    Workers of one process are alike, so which of its numbers each gets does not matter.

    Raises:  MeasurementError when a worker is missing.
    """
    names: dict[int, str] = {}
    for role in ("prefill", "decode") if fleet.prefill else ("aggregated",):
        ids = dict(_instances(running.plan, Role(role), bool(policy.plugin)))
        for process, first, count in _pool(running.plan, role):
            pid = running.process(process).pid
            ports = listening_ports(pid) if pid is not None else set[int]()
            here = sorted(worker for worker, port in ids.items() if port in ports)
            if len(here) != count:
                raise MeasurementError(f"{process}: {len(here)} of its {count} workers are registered")
            names |= {worker: f"{role}-{first + index}" for index, worker in enumerate(here)}
    return names


def _pool(plan: Plan, role: str) -> Iterator[tuple[str, int, int]]:
    """Yield the processes of a pool: name, number of the first worker, how many."""
    prefix, first = "worker-" if role == "aggregated" else f"{role}-", 0
    for process in plan.processes:
        if process.name.startswith(prefix):
            count = int(process.argv[process.argv.index("--num-workers") + 1])
            yield process.name, first, count
            first += count


def _instances(plan: Plan, role: Role, routed: bool) -> Iterator[tuple[int, int]]:
    """Yield id and port of each worker in discovery's folder."""
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    assert not isinstance(plan.discovery, str)
    endpoint = common.worker_endpoint(role) if routed else common.router_endpoint(role)
    wanted = dict(zip(("namespace", "component", "endpoint"), endpoint.split("."), strict=True))
    for path in (plan.discovery / "v1" / "instances").iterdir():
        try:
            found = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:  # gone meanwhile
            continue
        if all(found.get(key) == value for key, value in wanted.items()):
            yield found["instance_id"], int(found["transport"]["tcp"].split("/")[0].rpartition(":")[2])
