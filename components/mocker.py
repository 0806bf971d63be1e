"""Decides how Dynamo's mock engine is started.

Owns: its command line, several workers to a process if wanted.
Does not own: its timing model; that is `args` (`speedup-ratio`, `num-gpu-blocks-override`, ...).
Source: `python -m dynamo.mocker --help`, Dynamo 1.4.2. Without bootstrap ports its decode worker prefills the
        prompt a second time (measured), so they are given whenever the hand-over allows.
"""

from components.engine import Launch, WorkerProcess
from dynamo_poa.values import Role

RESERVED = {
    "model-path": "Common.model_path",
    "model-name": "Common.model_name",
    "block-size": "Common.block_size",
    "endpoint": "Common.namespace",
    "disaggregation-mode": "the graph",
    "is-prefill-worker": "the graph",
    "is-decode-worker": "the graph",
    "num-workers": "per_process",
    "bootstrap-ports": "Common.handover",
}
_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.AGGREGATED: "agg"}


def launch(worker: WorkerProcess) -> Launch:
    """Return flags of one mock engine process."""
    arguments: dict[str, object] = {
        "model-path": worker.model_path,
        "model-name": worker.model_name,
        "endpoint": worker.endpoint,
        "disaggregation-mode": _MODES[worker.role],
        "num-workers": worker.workers,
        "block-size": worker.block_size,
    }
    if worker.bootstrap and worker.role is Role.PREFILL:
        first = worker.ports(worker.workers)
        arguments["bootstrap-ports"] = ",".join(str(first + i) for i in range(worker.workers))
    return Launch(arguments=arguments)
