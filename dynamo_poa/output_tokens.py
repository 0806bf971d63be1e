"""How many decode iterations a request takes and what it holds while it does, by pool.

Owns: the ratio of what a pool's passes decoded to the requests that ended there, of late; that of what they
      held to what they decoded.
Does not own: the passes (fleet.py), the requests that ended (decisions.py), what the means are used for.
Invariant: unknown until enough requests have ended; then the last one known, also when traffic ceases.
"""

import math
from collections import Counter
from collections.abc import Mapping

from dynamo_poa.values import Outcome, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import ForwardPass

MEMORY_S = 30.0  # weight of what happened so long ago: 1/e
ENOUGH_REQUESTS = 8.0  # weighted; before that, what is decoded belongs to requests that have yet to end
DECODED = (Outcome.OK, Outcome.CANCELLED)  # a request that failed or was refused may have decoded nothing


def decoded_requests(outcomes: Mapping[tuple[Role, Outcome], int]) -> dict[Role, int]:
    """Return how many requests have ended that were decoded, of the legs that decode."""
    return {
        role: sum(outcomes.get((role, outcome), 0) for outcome in DECODED)
        for role in (Role.DECODE, Role.AGGREGATED)
    }


class OutputTokens:
    """Counts as it goes; `mean` and `contexts` hold what is known.

    mean = decoded / ended, both weighted by exp(-age / MEMORY_S)
    contexts = tokens held / decoded, likewise: over all iterations, so a long answer counts more
    """

    def __init__(self) -> None:
        self.mean: dict[Role, float] = {}
        self.contexts: dict[Role, float] = {}
        self._decoded: Counter[Role] = Counter()  # since the last update
        self._held: Counter[Role] = Counter()
        self._weighted: dict[Role, tuple[float, float, float]] = {}  # decoded, held, ended
        self._ended: dict[Role, int] = {}
        self._at_s: float | None = None

    def observe(self, key: WorkerKey, card: WorkerCard, done: ForwardPass, at_s: float) -> None:
        """Count what a pass decoded: one token of each request in it."""
        if done.decode_requests:
            self._decoded[card.role] += done.decode_requests
            self._held[card.role] += done.decode_kv_tokens

    def update(self, at_s: float, ended: Mapping[Role, int]) -> None:
        """Take in how many requests have ended by role since the start, at a monotonic instant."""
        elapsed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
        self._at_s = at_s
        weight = math.exp(-elapsed_s / MEMORY_S)
        for role in {*self._decoded, *self._weighted}:
            decoded, held, requests = self._weighted.get(role, (0.0, 0.0, 0.0))
            decoded = weight * decoded + self._decoded.pop(role, 0)
            held = weight * held + self._held.pop(role, 0)
            requests = weight * requests + ended.get(role, 0) - self._ended.get(role, 0)
            self._weighted[role] = (decoded, held, requests)
            if requests >= ENOUGH_REQUESTS and decoded:
                self.mean[role] = decoded / requests
                if held:  # some engines do not tell
                    self.contexts[role] = held / decoded
        self._ended = dict(ended)
