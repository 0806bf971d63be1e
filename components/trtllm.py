"""Decides how a TensorRT-LLM worker is started.

Owns: the flags that make TensorRT-LLM a worker of this graph: model, role, endpoint, events.
Does not own: what the engine does with its GPU, that is `args` (`extra-engine-args`, ...); forward-pass
      metrics, which this engine does not publish in Dynamo 1.4.2.
Source: `dynamo/trtllm/{args,backend_args}.py`, Dynamo 1.4.2: `agg` is the aggregated mode's name, and KV
        events are off unless asked for.
"""

from components.engine import Launch, WorkerProcess
from dynamo_poa.values import Role

RESERVED = {
    "model": "Common.model_path",
    "model-path": "Common.model_path",
    "served-model-name": "Common.model_name",
    "kv-block-size": "Common.block_size",
    "endpoint": "Common.namespace",
    "namespace": "Common.namespace",
    "disaggregation-mode": "the graph",
}
_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.AGGREGATED: "agg"}


def launch(worker: WorkerProcess) -> Launch:
    """Return flags of one TensorRT-LLM worker."""
    arguments: dict[str, object] = {
        "model": worker.model_path,
        "served-model-name": worker.model_name,
        "endpoint": worker.endpoint,
        "disaggregation-mode": _MODES[worker.role],
        "kv-block-size": worker.block_size,
    }
    if worker.publishes_kv_events:
        arguments["publish-kv-events"] = True
    return Launch(arguments=arguments)
