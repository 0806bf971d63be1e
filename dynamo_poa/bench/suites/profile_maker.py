"""How the timing profiles were made: NVIDIA's performance database asked for two models on B200.

Owns: which models, precisions and batch shapes; the tables' grids.
Does not own: the database and its interpolation (aiconfigurator-core), how the mock engine reads a table.
Invariant: every number is the database's answer; nothing is fitted or scaled here.
Source:   aiconfigurator-core 0.12.0 (PyPI), b200_sxm, vLLM 0.24.0, BF16. It does not know Nemotron-4-340B, so
          that is its family of plain decoders with the published dimensions (arXiv 2406.11704, table 1).

Run by hand, in an environment of its own, for this package needs none of it:
    python -m venv aic && aic/bin/pip install aiconfigurator-core==0.12.0
    aic/bin/python dynamo_poa/bench/suites/profile_maker.py dynamo_poa/bench/suites/profiles
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SYSTEM, BACKEND, BACKEND_VERSION, RELEASE = "b200_sxm", "vllm", "0.24.0", "0.12.0"
MEMORY_FRAC = 0.9  # of a GPU's memory that vLLM takes [vLLM's default]
BLOCK_TOKENS = 16
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192  # the mock engine's defaults
PREFILL_TOKENS = np.unique(np.geomspace(1, 65_536, 65).round()).astype(np.float64)
CONTEXT_TOKENS = np.unique(np.geomspace(16, 131_072, 27).round()).astype(np.float64)
KV_POINTS = 41

NEMOTRON_4_340B = {
    "architectures": ["PlainDecoder"],
    "hidden_size": 18_432,
    "intermediate_size": 73_728,
    "num_hidden_layers": 96,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 192,
    "vocab_size": 256_000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def make(folder: Path, name: str, model: str, model_path: str, tensor_parallel: int) -> None:
    """Write one profile: its tables and what they are."""
    from aiconfigurator_core.sdk.engine import EngineHandle
    from aiconfigurator_core.sdk.memory import estimate_num_gpu_blocks

    engine = EngineHandle.compile(
        model_path, SYSTEM, BACKEND, backend_version=BACKEND_VERSION, tp_size=tensor_parallel
    )
    kv_blocks = estimate_num_gpu_blocks(
        model_path,
        SYSTEM,
        BACKEND,
        BACKEND_VERSION,
        scheduler_block_size=BLOCK_TOKENS,
        max_num_tokens=MAX_NUM_BATCHED_TOKENS,
        max_batch_size=MAX_NUM_SEQS,
        memory_fraction_kind="of_total",
        memory_fraction_value=MEMORY_FRAC,
        tp_size=tensor_parallel,
    )
    kv_tokens = np.unique(np.geomspace(16, kv_blocks * BLOCK_TOKENS, KV_POINTS).round()).astype(np.float64)
    np.savez(
        folder / f"{name}.npz",
        prefill_isl=PREFILL_TOKENS,
        prefill_ttft_ms=np.array([engine.predict_prefill_latency(1, int(n)) for n in PREFILL_TOKENS]),
        decode_active_kv_tokens=kv_tokens,
        decode_context_length=CONTEXT_TOKENS,
        decode_itl=np.array(
            [[_step_ms(engine, kv, context) for context in CONTEXT_TOKENS] for kv in kv_tokens]
        ),
    )
    about = {
        "name": name,
        "gpu": "B200 SXM",
        "model": model,
        "tensor_parallel": tensor_parallel,
        "kv_blocks": kv_blocks,
        "source": f"aiconfigurator-core {RELEASE} (PyPI), {SYSTEM}, {BACKEND} {BACKEND_VERSION}, BF16: its "
        "estimate from kernels that NVIDIA measured, not a measured engine; KV blocks at 90 % of memory",
    }
    (folder / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n")


def _step_ms(engine: Any, kv_tokens: float, context_tokens: float) -> float:
    """Return one decode step of as many requests of that context as hold so many KV tokens, one at least."""
    requests = max(1, round(kv_tokens / context_tokens))
    return float(engine.decode_step_latency(requests, int(context_tokens), 2))


def main() -> None:
    """Write both profiles into the folder given."""
    from aiconfigurator_core.sdk.common import ARCHITECTURE_TO_MODEL_FAMILY

    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    make(folder, "b200-llama-70b-tp4", "Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B", 4)
    ARCHITECTURE_TO_MODEL_FAMILY["PlainDecoder"] = "GPT"
    with tempfile.TemporaryDirectory() as model_path:
        (Path(model_path) / "config.json").write_text(json.dumps(NEMOTRON_4_340B))
        make(folder, "b200-nemotron-340b-tp8", "Nemotron-4-340B", model_path, 8)


if __name__ == "__main__":
    main()
