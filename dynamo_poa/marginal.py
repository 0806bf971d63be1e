"""Which worker a request costs everybody least on: its own time there, and the delay it brings to others.

Owns: the cost of a request on one worker, of each leg; what a worker's stalls cost; the choice among costs.
Does not own: what is in flight where (ledger.py), the speeds (coefficients.py), who may be chosen
              (picker.py).
Invariant: pure, plain arithmetic: it runs once per worker and request on the request path. A worker's own
           curve prices it, so that an idle slow one is not cheap for being idle.
Source: theory.md, Marginal-cost routing: a toll equal to the externality makes the selfish choice the social
        one. Stalls: case R6.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dynamo_poa.values import KV_LIMIT_FRAC, KV_PRESSURE_FRAC, Curve, Role

NEAR_FRAC = 0.01  # costs as close as this are equal: the models are not better than that
OUTPUT_TOKENS = 64.0  # expected of a request where nothing is known of the pool
# On a worker that does both: a wait before the first token is felt then, and again in the whole. Measured
# (hetero) and simulated: with 1 throughput is had at TTFT's cost; with 10 TTFT is as under Dynamo's selection
# or better, and throughput stays.
TTFT_WEIGHT = 10.0
MIN_GAP_S = 0.3  # a pause shorter than this is no stall, whatever the worker's speed
STALL_WEIGHT = 3.0  # a stall hits the tail: each second of it counts as so many of a mean
_UNPRESSED = 1 / (1 - KV_PRESSURE_FRAC / KV_LIMIT_FRAC)


class Load(Protocol):
    """What is in flight on a worker: ledger.Work.

    running:        requests past their first token
    waiting:        requests before it
    queued_tokens:  prompt tokens the waiting ones still have to have computed
    kv_tokens:      of both, prompt and half of the output expected
    joining:        of the waiting, those that came since the pass began that the worker is at: they wait for
                    the next, with whoever comes before it begins
    joining_tokens: of their prompts
    moved_at_s:     when that pass began
    """

    @property
    def running(self) -> float: ...  # noqa: D102
    @property
    def waiting(self) -> float: ...  # noqa: D102
    @property
    def queued_tokens(self) -> float: ...  # noqa: D102
    @property
    def kv_tokens(self) -> float: ...  # noqa: D102
    @property
    def joining(self) -> float: ...  # noqa: D102
    @property
    def joining_tokens(self) -> float: ...  # noqa: D102
    @property
    def moved_at_s(self) -> float: ...  # noqa: D102


class Loads(NamedTuple):
    """A load as a value."""

    running: float = 0.0
    waiting: float = 0.0
    queued_tokens: float = 0.0
    kv_tokens: float = 0.0
    joining: float = 0.0
    joining_tokens: float = 0.0
    moved_at_s: float = 0.0


class Room(NamedTuple):
    """What a worker can hold at once; beyond it requests wait.

    batch_tokens:  prompt tokens that a pass computes at most
    """

    requests: float = math.inf
    kv_tokens: float = math.inf
    batch_tokens: float = math.inf


class Ask(NamedTuple):
    """What is asked for: the same on every worker.

    arrivals_per_s:  requests that a worker of this leg is sent, mean over workers
    at_s:            now, on the clock of Load.moved_at_s
    """

    prompt_tokens: float
    output_tokens: float = OUTPUT_TOKENS
    arrivals_per_s: float = 0.0
    at_s: float = 0.0


def pressure(kv_frac: float) -> float:
    """Return what fitting.pressure does, of one number: 0 up to KV_PRESSURE_FRAC."""
    if kv_frac <= KV_PRESSURE_FRAC:
        return 0.0
    return 1 / (1 - min(kv_frac, 1.0) / KV_LIMIT_FRAC) - _UNPRESSED


def iteration_s(curve: Curve, requests: float, kv_tokens: float, room: Room) -> float:
    """Return what latency.iteration_s does, of numbers; with no request it is 0."""
    if requests <= 0:
        return 0.0
    taken_s = curve.decode_base_s + curve.decode_request_s * requests + curve.decode_kv_token_s * kv_tokens
    if curve.pressure_s:
        taken_s += curve.pressure_s * pressure(kv_tokens / room.kv_tokens)
    return taken_s


def backlog_s(curve: Curve, load: Load) -> float:
    """Return how long the prompts that wait on a worker will take it."""
    if load.waiting <= 0:
        return 0.0
    return curve.prefill_base_s + curve.prefill_token_s * load.queued_tokens


def prefill_cost_s(curve: Curve, load: Load, uncached_tokens: float, ask: Ask, room: Room) -> float:
    """Return the cost on a prefill worker.

        T + (j + lambda T) a s          T = |b + a Q - age| + b + a (J + s)

    T is the time to the first token: what is left of the pass that computes Q tokens, if any, and the next
    one, which computes this prompt's s and J of the j that wait for it too. Those j, and those that come
    while this request is there, wait a s longer for it. The base b they share: a pass comes in any case.

    A pass that takes longer than it should is as likely to take that much longer still.
    """
    wait_s, _ = _wait(curve, load, uncached_tokens, ask, room)
    behind = load.joining + ask.arrivals_per_s * wait_s
    return wait_s + behind * curve.prefill_token_s * uncached_tokens


def _wait(curve: Curve, load: Load, uncached_tokens: float, ask: Ask, room: Room) -> tuple[float, float]:
    """Return how long the first token takes, and how much longer the next pass for this prompt.

    Prompts of more than a pass takes are computed in several, each with its base.
    """
    base_s, token_s, batch = curve.prefill_base_s, curve.prefill_token_s, room.batch_tokens
    joining, joining_tokens = load.joining, load.joining_tokens
    rest_s = 0.0
    if load.waiting > joining:
        computing = load.queued_tokens - joining_tokens
        passes = math.ceil(computing / batch) if computing > batch else 1
        rest_s = abs(passes * base_s + token_s * computing - (ask.at_s - load.moved_at_s))
    tokens = joining_tokens + uncached_tokens
    before, passes = (1 if joining else 0), 1
    if tokens > batch:
        before, passes = math.ceil(joining_tokens / batch), math.ceil(tokens / batch)
    wait_s = rest_s + passes * base_s + token_s * tokens
    return wait_s, (passes - before) * base_s + token_s * uncached_tokens


def decode_cost_s(curve: Curve, load: Load, uncached_tokens: float, ask: Ask, room: Room) -> float:
    """Return the cost on a decode worker; all in flight there will decode, whether they do yet or not.

        O l(y + 1, k + P + O/2) + y O (l(y + 1, .) - l(y, k))       y: in flight, O and P: output and prompt

    Where the worker is full the overflow waits for room, and so do as many others:

        + 2 (overflow / room) O l        of requests or of KV tokens, whichever is more
    """
    others, output_tokens = load.running + load.waiting, ask.output_tokens
    kv_before = load.kv_tokens
    kv_tokens, requests = kv_before + ask.prompt_tokens + output_tokens / 2, others + 1
    over_frac = 0.0
    if requests > room.requests:
        over_frac, requests = (requests - room.requests) / room.requests, room.requests
        others = min(others, room.requests)
    if kv_tokens > room.kv_tokens:
        over_frac = max(over_frac, (kv_tokens - room.kv_tokens) / room.kv_tokens)
        kv_tokens, kv_before = room.kv_tokens, min(kv_before, room.kv_tokens)
    pass_s = iteration_s(curve, requests, kv_tokens, room)
    own_s = output_tokens * pass_s
    toll_s = others * output_tokens * (pass_s - iteration_s(curve, others, kv_before, room))
    return own_s + toll_s + 2 * over_frac * own_s


def aggregated_cost_s(curve: Curve, load: Load, uncached_tokens: float, ask: Ask, room: Room) -> float:
    """Return the cost on a worker that does both: TTFT_WEIGHT x prefill's, decode's, and x e.

    While this prompt is computed the x requests that decode already stand still: e = b [j = 0] + a s, for
    with others that wait the pass is due anyway.
    """
    wait_s, longer_s = _wait(curve, load, uncached_tokens, ask, room)
    behind = load.joining + ask.arrivals_per_s * wait_s
    return (
        TTFT_WEIGHT * (wait_s + behind * curve.prefill_token_s * uncached_tokens)
        + load.running * longer_s
        + decode_cost_s(curve, load, uncached_tokens, ask, room)
    )


Cost = Callable[[Curve, Load, float, Ask, Room], float]
COST: dict[Role, Cost] = {
    Role.PREFILL: prefill_cost_s,
    Role.DECODE: decode_cost_s,
    Role.AGGREGATED: aggregated_cost_s,
}


def patience_s(role: Role, curve: Curve, load: Load) -> float:
    """Return how long a busy worker may be silent before it counts as stalled.

    max(0.3 s, 5 l + 2 B)         l: a decode pass with what runs there, B: the backlog of prompts
    """
    pass_s = 0.0
    if load.running > 0 and role is not Role.PREFILL:
        pass_s = (
            curve.decode_base_s
            + curve.decode_request_s * load.running
            + curve.decode_kv_token_s * load.kv_tokens
        )
    prompts_s = 0.0 if role is Role.DECODE else backlog_s(curve, load)
    return max(MIN_GAP_S, 5 * pass_s + 2 * prompts_s)


def stalls_cost_s(stalled_frac: float, mean_stall_s: float, busy_s: float) -> float:
    """Return what stalls of the kind seen will cost a request that is on the worker for `busy_s`.

        STALL_WEIGHT nu L (busy + L/2)        nu L = stalled_frac, L = mean_stall_s

    While it runs nu busy stalls begin; and with probability nu L it comes into one, half of which is left.
    """
    return STALL_WEIGHT * stalled_frac * (busy_s + mean_stall_s / 2)


def choose(costs_s: Sequence[float], rng: random.Random) -> int:
    """Return the place of the least cost; of those within NEAR_FRAC of it any, by chance.

    Always the same of several equal workers would send it all that comes between two looks at it.
    """
    limit_s = min(costs_s) * (1 + NEAR_FRAC)
    near = [place for place, cost_s in enumerate(costs_s) if cost_s <= limit_s]
    return near[0] if len(near) == 1 else rng.choice(near)
