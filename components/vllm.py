"""Decides how a vLLM worker is started.

Owns: the flags that make vLLM a worker of this graph: model, role, endpoint, events and metrics.
Does not own: what the engine does with its GPU; that is `args` (`tensor-parallel-size`, ...).
Source: `dynamo/vllm/{args,backend_args,envs}.py`, Dynamo 1.4.2: a prefill worker refuses to start without
        `--kv-transfer-config`; forward-pass metrics are off without DYN_FORWARDPASS_METRIC_PORT.
"""

from components.engine import Launch, WorkerProcess
from dynamo_poa.values import Role

RESERVED = {
    "model": "Common.model_path",
    "served-model-name": "Common.model_name",
    "block-size": "Common.block_size",
    "endpoint": "Common.namespace",
    "namespace": "Common.namespace",
    "disaggregation-mode": "the graph",
}
_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.AGGREGATED: "agg"}


def launch(worker: WorkerProcess) -> Launch:
    """Return flags and environment of one vLLM worker; its ports are its own, as workers share a machine."""
    arguments: dict[str, object] = {
        "model": worker.model_path,
        "served-model-name": worker.model_name,
        "endpoint": worker.endpoint,
        "disaggregation-mode": _MODES[worker.role],
        "block-size": worker.block_size,
    }
    env = {"DYN_FORWARDPASS_METRIC_PORT": str(worker.ports(1))}
    if worker.publishes_kv_events:
        arguments["kv-events-config"] = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{worker.ports(1)}",
            "enable_kv_cache_events": True,
        }
    if worker.role is not Role.AGGREGATED:
        arguments["kv-transfer-config"] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(worker.ports(1))
    return Launch(arguments=arguments, env=env)
