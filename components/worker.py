"""Decides which processes a pool of workers consists of, whatever engine runs in them.

Owns: the three pools of the shipped graphs, how workers are spread over processes and GPUs over workers.
Does not own: an engine's flags: each engine's own file answers a `WorkerProcess` with a `Launch`.
Invariant: a pool is up when discovery lists all its workers, not when its processes run.
"""

from types import ModuleType

from components import mocker, sglang, trtllm, vllm
from components.engine import Launch, WorkerProcess
from dynamo_poa.config import WorkerConfig
from dynamo_poa.serve.flags import flags, reserved_problems
from dynamo_poa.serve.graph import Component, Process, Registered, Site, Stage
from dynamo_poa.values import Role

ENGINES: dict[str, ModuleType] = {"mocker": mocker, "vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def _pool(name: str, role: Role, label: str) -> Component:
    def processes(config: WorkerConfig, site: Site) -> list[Process]:
        ready = Registered(site.endpoint(role), config.workers)
        result = []
        for index, start in enumerate(range(0, config.workers, config.per_process)):
            worker = WorkerProcess(
                role=role,
                endpoint=f"dyn://{site.endpoint(role)}",
                model_path=site.common.model_path,
                model_name=site.common.model_name,
                block_size=site.common.block_size,
                workers=min(config.per_process, config.workers - start),
                bootstrap=site.bootstrap,
                ports=site.ports,
            )
            launch: Launch = ENGINES[config.engine].launch(worker)
            result.append(
                Process(
                    name=f"{label}-{index}",
                    stage=Stage.WORKERS,
                    argv=site.python(f"dynamo.{config.engine}", *flags({**launch.arguments, **config.args})),
                    ready=ready,
                    env={**launch.env, **_gpu_env(config, index), **config.env},
                )
            )
        return result

    def problems(config: WorkerConfig) -> list[str]:
        found = reserved_problems(name, config.args, ENGINES[config.engine].RESERVED)
        if config.engine != "mocker" and config.per_process != 1:
            found.append(f"{name}.per_process = {config.per_process}: must be 1 with engine {config.engine}")
        if len(config.gpus) % config.workers:
            found.append(
                f"{name}.gpus = {list(config.gpus)}: must be a multiple of {name}.workers = {config.workers}"
            )
        return found

    return Component(name, WorkerConfig, processes, role=role, problems=problems)


def _gpu_env(config: WorkerConfig, index: int) -> dict[str, str]:
    share = len(config.gpus) // config.workers
    if not share:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.gpus[index * share : (index + 1) * share]))}


PrefillWorker = _pool("PrefillWorker", Role.PREFILL, "prefill")
DecodeWorker = _pool("DecodeWorker", Role.DECODE, "decode")
Worker = _pool("Worker", Role.AGGREGATED, "worker")
