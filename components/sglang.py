"""Decides how an SGLang worker is started.

Owns: the flags that make SGLang a worker of this graph: model, role, endpoint, events and metrics.
Does not own: what the engine does with its GPU; that is `args` (`tp`, ...).
Source: `dynamo/sglang/args.py`, Dynamo 1.4.2: without `--disaggregation-mode` it is aggregated, `--page-size`
        is its KV block size, and `--kv-events-config` without an endpoint is refused. Its prefill worker
        always hands over by bootstrap (`register.py`).
"""

from components.engine import Launch, WorkerProcess
from dynamo_poa.values import Role

RESERVED = {
    "model-path": "Common.model_path",
    "served-model-name": "Common.model_name",
    "page-size": "Common.block_size",
    "endpoint": "Common.namespace",
    "namespace": "Common.namespace",
    "disaggregation-mode": "the graph",
}


def launch(worker: WorkerProcess) -> Launch:
    """Return flags and environment of one SGLang worker; its ports are its own: workers share a machine."""
    arguments: dict[str, object] = {
        "model-path": worker.model_path,
        "served-model-name": worker.model_name,
        "endpoint": worker.endpoint,
        "page-size": worker.block_size,
        "enable-metrics": True,
    }
    if worker.role is not Role.AGGREGATED:
        arguments["disaggregation-mode"] = worker.role.value
        arguments["disaggregation-transfer-backend"] = "nixl"
    if worker.role is Role.PREFILL:
        arguments["disaggregation-bootstrap-port"] = worker.ports(1)
    if worker.publishes_kv_events:
        arguments["kv-events-config"] = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{worker.ports(1)}",
        }
    return Launch(arguments=arguments, env={"DYN_FORWARDPASS_METRIC_PORT": str(worker.ports(1))})
