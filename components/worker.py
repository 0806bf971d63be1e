"""Decides which processes a pool of workers consists of, whatever engine runs in them.

Owns: the three pools of the shipped graphs, how workers are spread over processes and GPUs over workers.
Does not own: an engine's flags: each engine's own file answers a `WorkerProcess` with a `Launch`.
Invariant: a pool is up when discovery lists all its workers, not when its processes run.
"""

from collections.abc import Iterator
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
        for index, numbers in enumerate(_by_process(config)):
            worker = WorkerProcess(
                role=role,
                endpoint=f"dyn://{site.endpoint(role)}",
                model_path=site.common.model_path,
                model_name=site.common.model_name,
                block_size=site.common.block_size,
                workers=len(numbers),
                bootstrap=site.bootstrap,
                ports=site.ports,
            )
            launch: Launch = ENGINES[config.engine].launch(worker)
            arguments = {**launch.arguments, **config.args, **config.args_of.get(numbers[0], {})}
            result.append(
                Process(
                    name=f"{label}-{index}",
                    stage=Stage.WORKERS,
                    argv=site.python(f"dynamo.{config.engine}", *flags(arguments)),
                    ready=ready,
                    env={**launch.env, **_gpu_env(config, numbers), **config.env},
                )
            )
        return result

    def problems(config: WorkerConfig) -> list[str]:
        reserved = ENGINES[config.engine].RESERVED
        found = reserved_problems(f"{name}.args", config.args, reserved)
        for number, args in config.args_of.items():
            found += reserved_problems(f"{name}.args_of.{number}", args, reserved)
        if config.engine != "mocker" and config.per_process != 1:
            found.append(f"{name}.per_process = {config.per_process}: must be 1 with engine {config.engine}")
        if len(config.gpus) % config.workers:
            found.append(
                f"{name}.gpus = {list(config.gpus)}: must be a multiple of {name}.workers = {config.workers}"
            )
        return found

    return Component(name, WorkerConfig, processes, role=role, problems=problems)


def _by_process(config: WorkerConfig) -> Iterator[range]:
    """Yield the numbers of the workers of each process: one that has flags of its own is alone in its."""
    start = 0
    while start < config.workers:
        end = start + 1
        while (
            end < min(start + config.per_process, config.workers) and not {start, end} & config.args_of.keys()
        ):
            end += 1
        yield range(start, end)
        start = end


def _gpu_env(config: WorkerConfig, numbers: range) -> dict[str, str]:
    share = len(config.gpus) // config.workers
    if not share:
        return {}
    gpus = config.gpus[numbers.start * share : numbers.stop * share]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


PrefillWorker = _pool("PrefillWorker", Role.PREFILL, "prefill")
DecodeWorker = _pool("DecodeWorker", Role.DECODE, "decode")
Worker = _pool("Worker", Role.AGGREGATED, "worker")
