"""How the results of Dynamo's profiler become a timing profile for its mock engine.

Owns: reading a results folder, the fit, the tables' grids.
Does not own: profiling; profiles by name (profiles.py).
Invariant: no time falls with more work: the fits have no negative coefficient.
Source:   host: dynamo/mocker/utils/planner_profiler_perf_data_converter.py does the same with scikit-learn,
          which the wheel does not bring. The files are those of `python -m dynamo.profiler`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dynamo_poa.errors import ConfigError

GRID = 60
_PREFILL = ("selected_prefill_interpolation/raw_data.npz", "prefill_raw_data.json")
_DECODE = ("selected_decode_interpolation/raw_data.npz", "decode_raw_data.json")


def write_tables(folder: Path, target: Path) -> None:
    """Fit a folder's results and write the tables.

        prefill_ms = a + b * tokens        step_ms = a + b * requests + c * KV tokens

    Raises:  ConfigError naming the file that is missing or not what it should be.
    """
    prefill, decode = _read(folder, _PREFILL), _read(folder, _DECODE)
    try:
        tokens = np.asarray(prefill["prefill_isl"], dtype=np.float64)
        ttft_ms = np.asarray(prefill["prefill_ttft"], dtype=np.float64)
        most_kv_tokens = float(np.asarray(decode["max_kv_tokens"]).ravel()[0])
        kv_tokens = np.asarray(decode["x_kv_usage"], dtype=np.float64) * most_kv_tokens
        context_tokens = np.asarray(decode["y_context_length"], dtype=np.float64)
        step_ms = np.asarray(decode["z_itl"], dtype=np.float64)
        requests = np.maximum(np.round(kv_tokens / context_tokens), 1.0)
        prefill_fit = _fit((tokens,), ttft_ms)
        decode_fit = _fit((requests, kv_tokens), step_ms)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError([f"profile {folder}: not the profiler's results: {error}"]) from error
    prefill_grid = np.linspace(1.0, tokens.max(), GRID)
    kv_grid = np.linspace(1.0, kv_tokens.max(), GRID)
    context_grid = np.linspace(1.0, context_tokens.max(), GRID)
    batch = np.maximum(kv_grid[:, None] / context_grid[None, :], 1.0)
    np.savez(
        target,
        prefill_isl=prefill_grid,
        prefill_ttft_ms=prefill_fit[0] + prefill_fit[1] * prefill_grid,
        decode_active_kv_tokens=kv_grid,
        decode_context_length=context_grid,
        decode_itl=decode_fit[0] + decode_fit[1] * batch + decode_fit[2] * kv_grid[:, None],
    )


def _fit(features: tuple[np.ndarray, ...], times_ms: np.ndarray) -> np.ndarray:
    """Return intercept and coefficients by least squares, none below 0."""
    columns = np.stack([np.ones_like(times_ms), *features], axis=1)
    scale = np.abs(columns).max(axis=0)  # tokens are a million times the intercept's column
    coefficients, _ = nnls(columns / scale, times_ms)
    return np.asarray(coefficients / scale)


def _read(folder: Path, names: tuple[str, str]) -> Mapping[str, Any]:
    arrays, text = (folder / name for name in names)
    try:
        if arrays.exists():
            with np.load(arrays) as data:
                return {key: data[key] for key in data.files}
        found: Mapping[str, Any] = json.loads(text.read_text())
    except FileNotFoundError as error:
        raise ConfigError([f"profile {folder}: must hold {names[0]} or {names[1]}"]) from error
    except (OSError, ValueError) as error:
        raise ConfigError([f"profile {folder}: cannot be read: {error}"]) from error
    return found
