"""Whether workers differ in what they hold of a prompt, and how much of the prompts was found cached.

Owns: the window of decisions this is judged on, and when there are too few to judge.
Does not own: what follows for ω (controller.py), PoA-hat (estimator.py).
Invariant: bounded; too little is unknown, and a cache that has shown nothing has no hit share, least of
           all 0. Decode legs do not count: Dynamo ignores overlap there.
Source: case E6: with another block size, prompts under a block or no prefix cache, overlap is the same on
        every worker and ω moves nothing, without any error.
"""

from collections import deque
from typing import NamedTuple

from dynamo_poa.values import CacheSignal, CacheView, Role
from dynamo_poa.wire import Chosen

MIN_RECORDED = 32  # fewer recorded decisions are a start, not an absence
PRESENT_FRAC = 0.05  # workers that differ more rarely are nothing that ω could act on


class _Seen(NamedTuple):
    """One decision."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int


class _Recorded(NamedTuple):
    """One decision whose workers' loads were recorded: whether they differ in what they hold."""

    at_s: float
    differs: bool


class OverlapWindow:
    """The last decisions of the legs that compute prompts."""

    def __init__(self, window: int, block_size: int) -> None:
        self._block_size = block_size
        self._seen: deque[_Seen] = deque(maxlen=window)
        self._recorded: deque[_Recorded] = deque(maxlen=window)  # under load most decisions are not

    def add(self, event: Chosen, at_s: float) -> None:
        """Take in one decision."""
        if event.role is Role.DECODE:
            return
        cached_tokens = min(event.cached_tokens, event.prompt_tokens)
        self._seen.append(_Seen(at_s, event.prompt_tokens, cached_tokens))
        if event.candidates:
            uncached = [min(c.uncached_tokens, event.prompt_tokens) for c in event.candidates]
            self._recorded.append(_Recorded(at_s, max(uncached) - min(uncached) >= self._block_size))

    def forget(self, before_s: float) -> None:
        """Let go of decisions from before an instant."""
        while self._seen and self._seen[0].at_s < before_s:
            self._seen.popleft()
        while self._recorded and self._recorded[0].at_s < before_s:
            self._recorded.popleft()

    def view(self) -> CacheView:
        """Return what the window shows.

        Differences alone are no proof: KvRouter tells loads without and with a prompt in two answers, and
        what comes between looks like a difference (measured: in over 5 % of decisions at 8 requests at once).
        What the chosen worker holds is exact.
        """
        recorded = [decision.differs for decision in self._recorded]
        cached_tokens = sum(seen.cached_tokens for seen in self._seen)
        if len(recorded) < MIN_RECORDED:
            signal = CacheSignal.UNKNOWN
        elif cached_tokens and sum(recorded) >= PRESENT_FRAC * len(recorded):
            signal = CacheSignal.PRESENT
        else:
            signal = CacheSignal.ABSENT
        prompt_tokens = sum(seen.prompt_tokens for seen in self._seen)
        return CacheView(signal=signal, hit_frac=cached_tokens / prompt_tokens if cached_tokens else None)
