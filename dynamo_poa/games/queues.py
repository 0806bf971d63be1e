"""How many requests wait and run in two pools in a row, and what they wait and take there.

Owns: the population of the prefill pool and of the decode pool, as birth and death; the wait behind it;
      the loop that users close.
Does not own: what is within an objective, which split is best (allocation.py).
Invariant: arrays over splits in, arrays over splits out; nothing diverges: over capacity a queue grows for
           `horizon_s` and no longer.
Source: theory.md, Γ_PD. Queue lengths in heavy traffic: Allen and Cunneen. Processor sharing is insensitive
        to the distribution of work. A loop's other station may stand for all the rest of it: Chandy, Herzog
        and Woo 1975 (Norton's theorem).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa.latency import iteration_s
from dynamo_poa.values import Curve

Floats = NDArray[np.float64]

STATES = 768  # of a pool's population; a longer queue is counted in steps of more than one
_ROUNDS = 40  # of a bisection: the error left is a share of 2 ** -40
_TINY = 1e-300


class Prefill(NamedTuple):
    """A prompt on one worker: what its tokens take, and its passes.

    tokens_s:   time of a prompt's uncached tokens, mean
    base_s:     time of a pass beyond its tokens
    passes:     that a prompt needs when others share them as far as the batch goes, mean; <= `alone`
    alone:      that a prompt needs by itself, mean
    spread:     (1 + squared coefficient of variation of a prompt's time) / 2
    """

    tokens_s: float
    base_s: float
    passes: float
    alone: float
    spread: float

    def prompt_s(self, prompts: Floats) -> Floats:
        """Return a prompt's share of its worker's time when so many are there: passes are shared."""
        return self.tokens_s + self.base_s * np.maximum(self.alone / np.maximum(prompts, 1.0), self.passes)

    def rate_rps(self, workers: Floats, population: Floats) -> Floats:
        """Return how many prompts a second a pool gets done, each on a worker of its own while there are."""
        return np.minimum(population, workers) / self.prompt_s(population / workers)

    def most_rps(self, workers: Floats) -> Floats:
        """Return how many prompts a second it gets done at most."""
        return workers / (self.tokens_s + self.base_s * self.passes)


class Decode(NamedTuple):
    """A request on one worker: how many iterations it takes and what it holds; `most` run at a time."""

    curve: Curve
    iterations: float
    context_tokens: float
    kv_tokens: float
    most: float

    def step_s(self, workers: Floats, population: Floats) -> Floats:
        """Return how long an iteration takes, requests spread evenly."""
        running = np.clip(population / workers, 1.0, self.most)
        tokens = running * self.context_tokens
        step_s: Floats = iteration_s(self.curve, running, tokens, tokens / self.kv_tokens)
        return step_s

    def rate_rps(self, workers: Floats, population: Floats) -> Floats:
        """Return how many requests a second a pool gets done: as many run as have room."""
        running = np.minimum(population, workers * self.most)
        return running / (self.iterations * self.step_s(workers, population))

    def most_rps(self, workers: Floats) -> Floats:
        """Return how many requests a second it gets done with every place taken."""
        return self.rate_rps(workers, workers * self.most)


class Populations(NamedTuple):
    """Both pools, a row for each split.

    rate_rps:  requests a second that go through
    prefill:   population of the prefill pool; `arriving` are the chances that an arrival finds it, row sums 1
    decode:    population of the decode pool; `running` are the chances that a request there is one of so many
    """

    rate_rps: Floats
    prefill: Floats
    arriving: Floats
    decode: Floats
    running: Floats


def opened(
    arrival_rps: float, horizon_s: float, prefill: Prefill, decode: Decode, workers: Floats, beside: Floats
) -> Populations:
    """Return the pools under requests that come at random at a steady rate.

    Args:     workers, beside: `(k, 1)` prefill and decode workers of each split.
    """
    rate = np.full_like(workers, arrival_rps)
    prompts = _steps(
        workers * (1 + prefill.alone / prefill.passes), rate, prefill.most_rps(workers), horizon_s
    )
    theta = 1 / prefill.spread
    done = prefill.rate_rps(workers, np.maximum(prompts, _TINY))
    arriving = _chances(
        np.log(rate / done), prompts, prompts > workers, theta, rate >= prefill.most_rps(workers)
    )
    passed = np.minimum(rate, prefill.most_rps(workers))
    requests = _steps(beside * decode.most, passed, decode.most_rps(beside), horizon_s)
    done = decode.rate_rps(beside, np.maximum(requests, _TINY))
    full = requests > beside * decode.most
    running = _chances(np.log(passed / done), requests, full, 1.0, passed >= decode.most_rps(beside))
    return Populations(rate[:, 0], prompts, arriving, requests, _by_size(running, requests))


def closed(
    users: int,
    think_s: float | Floats,
    prefill: Prefill,
    decode: Decode,
    workers: Floats,
    beside: Floats,
) -> Populations:
    """Return the pools under users who each ask again when they have had their answer and thought.

    Births in the prefill pool are what the rest of the loop, decode and thought, gets done with those that
    are not in it; an arrival finds what the others left, so chances are weighed with births.

    Args:     think_s: or anything else that is neither queue nor decode, `(k, 1)`.
    """
    prompts = np.broadcast_to(
        np.unique(np.linspace(0, users, min(users, STATES) + 1).round()),
        (len(workers), min(users, STATES) + 1),
    )
    there, births = _rest(users - prompts, think_s, decode, beside)
    done = prefill.rate_rps(workers, np.maximum(prompts, _TINY))
    into = np.concatenate((births[:, :1], births[:, :-1]), axis=1)  # from the state before
    ratios = np.log(np.maximum(into, _TINY) / done)
    chances = _chances(ratios, prompts, prompts > workers, 1 / prefill.spread, np.zeros_like(workers) > 0)
    rate = (chances * births).sum(axis=1)
    arriving = chances * births / np.maximum(rate[:, None], _TINY)
    return Populations(rate, prompts, arriving, there, _by_size(chances, there))


def wait_s(prefill: Prefill, workers: Floats, prompts: Floats, rate_rps: Floats) -> Floats:
    """Return the longest an arrival waits that finds so many prompts: for those before it on its worker.

    wait = (n - m + 1) * spread / rate(n)        and those who come meanwhile join its pass
    """
    ahead = np.maximum(prompts - workers + 1, 0.0) * (prompts >= workers)
    joined = 1 + np.minimum(rate_rps / workers * prefill.tokens_s, 1.0)
    waited_s: Floats = ahead * prefill.spread * joined / prefill.rate_rps(workers, np.maximum(prompts, 1.0))
    return waited_s


def admission_s(decode: Decode, workers: Floats, requests: Floats) -> Floats:
    """Return how long a request waits for a place that finds so many in the decode pool."""
    ahead = np.maximum(requests - workers * decode.most + 1, 0.0) * (requests >= workers * decode.most)
    return ahead / np.maximum(decode.most_rps(workers), _TINY)


def _steps(usual: Floats, rate_rps: Floats, most_rps: Floats, horizon_s: float) -> Floats:
    """Return populations from 0 to what may come together in `horizon_s`, `(k, STATES)`.

    Chance alone adds up to about sqrt(2 * rate * horizon), whatever is over capacity adds to it.
    """
    grown = np.maximum(rate_rps - most_rps, 0.0) * horizon_s + np.sqrt(2 * rate_rps * horizon_s)
    step = np.maximum(np.ceil((usual + grown) / (STATES - 1)), 1.0)
    return step * np.arange(STATES)


def _chances(
    log_ratios: Floats, populations: Floats, queued: NDArray[np.bool_], theta: float, over: NDArray[np.bool_]
) -> Floats:
    """Return the chance of each population from births over deaths; rows sum to 1.

    A queue behind busy workers varies by `theta`: less for work that is alike. Over capacity all lengths that
    it grows through are as likely.
    """
    step = populations[:, 1:2] - populations[:, :1]
    logs = np.where(queued, log_ratios * theta, log_ratios)
    logs = np.where(queued & over, np.minimum(logs, 0.0), logs) * step
    logs[:, 0] = 0.0
    logs = np.cumsum(logs, axis=1)
    chances: Floats = np.exp(logs - logs.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    return chances


def _by_size(chances: Floats, populations: Floats) -> Floats:
    weights: Floats = chances * np.maximum(populations, _TINY)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _rest(others: Floats, think_s: float | Floats, decode: Decode, workers: Floats) -> tuple[Floats, Floats]:
    """Return how many of the others decode, and the rate at which they come back: found by bisection."""
    low, high = np.zeros_like(others), others.copy()
    for _ in range(_ROUNDS if np.any(np.asarray(think_s) > 0) else 0):
        middle = (low + high) / 2
        thinking = decode.rate_rps(workers, np.maximum(middle, _TINY)) * think_s
        too_many = middle + thinking > others
        high, low = np.where(too_many, middle, high), np.where(too_many, low, middle)
    there = high
    return there, np.where(others > 0, decode.rate_rps(workers, np.maximum(there, _TINY)), 0.0)
