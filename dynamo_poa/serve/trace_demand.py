"""What a trace asks for, second by second, in the form in which a running graph's prompts are kept.

Owns: when its requests come, which of their tokens count as cached.
Does not own: the file format (workloads/trace.py), what is made of it (advise.py).
Invariant: the same file gives the same seconds.
"""

from collections import OrderedDict

import numpy as np

from dynamo_poa.errors import ConfigError
from dynamo_poa.prompts import PROMPT, PROMPT_SQUARED, REQUESTS, UNCACHED, UNCACHED_SQUARED, Floats
from dynamo_poa.workloads import trace as traces
from dynamo_poa.workloads.request import Request

MAX_SECONDS = 14 * 86_400
BLOCK_TOKENS = 512  # that an id of a trace stands for


def demand_of(path: str, cache_tokens: int, rate_rps: float | None) -> tuple[Floats, float]:
    """Return a trace's prompts as PromptWindow has them, and how many tokens are generated, mean.

    Args:    cache_tokens: of one cache that all prompts meet.  rate_rps: mean, instead of the file's own.
    Raises:  ConfigError when the trace has no times of its own and no rate is given, or is too long.
    """
    requests = list(traces.read(path, BLOCK_TOKENS))
    at_s = _times_s(path, requests, rate_rps)
    order = np.argsort(at_s, kind="stable")
    uncached = np.zeros(len(requests))
    uncached[order] = _uncached([requests[index] for index in order.tolist()], cache_tokens)
    prompts = np.array([request.input_tokens for request in requests], dtype=np.float64)
    columns = {
        REQUESTS: np.ones(len(requests)),
        UNCACHED: uncached,
        UNCACHED_SQUARED: uncached**2,
        PROMPT: prompts,
        PROMPT_SQUARED: prompts**2,
    }
    seconds = np.zeros((int(at_s.max()) + 1, len(columns)))
    for column, values in columns.items():
        np.add.at(seconds[:, column], at_s.astype(int), values)
    return seconds, float(np.mean([request.output_tokens for request in requests]))


def _times_s(path: str, requests: list[Request], rate_rps: float | None) -> Floats:
    """Return when each request comes, from 0 on; at a rate the gaps keep their proportions."""
    at_s = np.array([request.at_s or 0.0 for request in requests])
    at_s -= at_s.min()
    span_s = float(at_s.max())
    if rate_rps is not None:
        evenly = np.arange(len(requests), dtype=np.float64)
        at_s = (evenly if span_s <= 0 else at_s * ((len(requests) - 1) / span_s)) / rate_rps
    elif span_s <= 0:
        raise ConfigError([f"trace {path}: all its requests come at one instant: give --rate"])
    if at_s.max() > MAX_SECONDS:
        raise ConfigError([f"trace {path}: {at_s.max():.0f} s long: must be <= {MAX_SECONDS} s"])
    return at_s


def _uncached(requests: list[Request], cache_tokens: int) -> list[int]:
    """Return how many tokens of each prompt a cache lacks that drops what was used longest ago."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in requests:
        held = next((place for place, block in enumerate(request.blocks) if block not in cache), None)
        hits = len(request.blocks) if held is None else held
        found.append(max(request.input_tokens - hits * BLOCK_TOKENS, 1))  # the last token always is computed
        for block in request.blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) * BLOCK_TOKENS > cache_tokens:
            cache.popitem(last=False)
    return found
