"""How fast a worker of a timing profile is, in the terms that workers are priced in.

Owns: which points of a profile's tables count, the fit.
Does not own: the tables (profiles.py), how measured workers are fitted (dynamo_poa/fitting.py).
Invariant: coefficients are never negative; how far the fit is off is told with it.
Source: theory.md, Latency models; how the mock engine reads a table:
        host: dynamo/mocker/utils/planner_profiler_perf_data_converter.py.
"""

from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dynamo_poa.errors import ConfigError
from dynamo_poa.values import Curve

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192  # the mock engine's: a pass is never larger

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """A curve and its mean error, as a share of what the table says."""

    curve: Curve
    error_frac: float


def curves_of(tables: Path) -> tuple[Fit, Fit]:
    """Return the curves of a profile's prefill and decode worker.

        prefill_s = a + b * tokens          iteration_s = a + b * requests + c * KV tokens

    Least squares of relative errors, so that short passes count as much as long ones.

    Raises:  ConfigError when the file is not such tables.
    """
    try:
        with np.load(tables) as data:
            tokens, prefill_ms = data["prefill_isl"], data["prefill_ttft_ms"]
            kv_tokens, context_tokens = data["decode_active_kv_tokens"], data["decode_context_length"]
            step_ms = data["decode_itl"]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ConfigError([f"profile {tables}: must be the mock engine's tables: {error}"]) from error
    within = tokens <= MAX_NUM_BATCHED_TOKENS
    (a, b), prefill_error = _fit([tokens[within]], prefill_ms[within] / 1000)
    requests = kv_tokens[:, None] / context_tokens[None, :]
    some = (requests >= 1) & (requests <= MAX_NUM_SEQS)
    loads = [requests[some], np.broadcast_to(kv_tokens[:, None], some.shape)[some]]
    (base, request, kv_token), decode_error = _fit(loads, step_ms[some] / 1000)
    return (
        Fit(Curve(prefill_base_s=a, prefill_token_s=b), prefill_error),
        Fit(Curve(decode_base_s=base, decode_request_s=request, decode_kv_token_s=kv_token), decode_error),
    )


def _fit(loads: list[Floats], seconds: Floats) -> tuple[list[float], float]:
    columns = np.stack([np.ones_like(seconds), *loads], axis=1)
    scale = columns.max(axis=0)  # tokens and requests are of other sizes
    terms, _ = nnls(columns / scale / seconds[:, None], np.ones_like(seconds))
    errors = np.abs(columns / scale @ terms / seconds - 1)
    return (terms / scale).tolist(), float(errors.mean())
