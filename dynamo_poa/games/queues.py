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

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtr

from dynamo_poa.latency import iteration_s
from dynamo_poa.values import Curve

Floats = NDArray[np.float64]

JOINING = 1.5  # iterations to the first token: half of one that runs already, and its own
STATES = 768  # of a pool's population; a longer queue is counted in steps of more than one
_ROUNDS = 24  # of a bisection: the error left is a share of 2 ** -24
_USUALLY = 3.0  # times the usual population is rare
_RARE = 1e-6  # populations rarer than this are left out
_MOST, _PARTS = 48, 8  # prompts ahead of one, and parts of a prompt, that chance tells apart
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

    def rate_rps(self, workers: Floats, population: Floats, blind: Floats) -> Floats:
        """Return how many prompts a second a pool gets done: by workers that have any."""
        with np.errstate(divide="ignore"):  # one worker has all, also by chance
            by_chance = -workers * np.expm1(population * np.log1p(-1 / workers))
        busy = (1 - blind) * np.minimum(population, workers) + blind * np.minimum(population, by_chance)
        return busy / self.prompt_s(population / workers)

    def most_rps(self, workers: Floats) -> Floats:
        """Return how many prompts a second it gets done at most."""
        return workers / (self.tokens_s + self.base_s * self.passes)


class Decode(NamedTuple):
    """A request on one worker: how many iterations it takes, what it holds, how many run at a time.

    spread:  mean of what is held, squared, over its mean's square: what many hold varies by so much more
    """

    curve: Curve
    iterations: float
    context_tokens: float
    spread: float
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

    def varies_s(self, workers: Floats, population: Floats) -> Floats:
        """Return the standard deviation of an iteration by what so many happen to hold, spread evenly."""
        many = np.minimum(population, workers * self.most)
        held_tokens = self.context_tokens * np.sqrt(many * (self.spread - 1)) / workers
        varies_s: Floats = self.curve.decode_kv_token_s * held_tokens
        return varies_s

    def delay_s(self, workers: Floats, population: Floats) -> Floats:
        """Return the time from the hand-over to the first token: until there is a place, then iterations."""
        behind = np.maximum(population - workers * self.most, 0.0)
        delay_s: Floats = behind / self.most_rps(workers) + JOINING * self.step_s(workers, population)
        return delay_s

    def most_rps(self, workers: Floats) -> Floats:
        """Return how many requests a second it gets done with every place taken."""
        return self.rate_rps(workers, workers * self.most)


class Populations(NamedTuple):
    """Both pools, a row for each split.

    rate_rps:  requests a second that go through
    prefill:   population of the prefill pool; `arriving` are the chances that an arrival finds it, row sums 1
    decode:    population of the decode pool; `running` are the chances that a token there comes of so many
    varies_s:  of an iteration with so many in the decode pool: its standard deviation
    delay_s:   from the hand-over to the first token, by population of the decode pool
    blind:     share of the prompts in the router's books that are computed already, `(k, 1)`: it takes
               one off them with its first token only. So far its choice of a worker is as good as random.
    """

    rate_rps: Floats
    prefill: Floats
    arriving: Floats
    decode: Floats
    running: Floats
    varies_s: Floats
    delay_s: Floats
    blind: Floats


def opened(
    arrival_rps: float, horizon_s: float, prefill: Prefill, decode: Decode, workers: Floats, beside: Floats
) -> Populations:
    """Return the pools under requests that come at random at a steady rate.

    Args:     workers, beside: `(k, 1)` prefill and decode workers of each split.
    """
    rate, most = np.full_like(workers, arrival_rps), prefill.most_rps(workers)
    passed = np.minimum(rate, most)
    usual = _reached(lambda many: decode.rate_rps(beside, many), passed, beside * decode.most)
    requests = _steps(usual, passed, decode.most_rps(beside), horizon_s, decode.spread)
    # What varies by more about the same mean: (rate / n) ** theta alone would move it by half of the excess.
    done = decode.rate_rps(beside, np.maximum(requests + (decode.spread - 1) / 2, _TINY))
    over = (passed >= decode.most_rps(beside)) & (requests > beside * decode.most)
    chances = _chances(_log(passed) - _log(done), requests, requests > 0, 1 / decode.spread, over)
    running = _weighed(chances, decode.rate_rps(beside, requests))
    delay_s = decode.delay_s(beside, requests)
    blind = _blind(delay_s, running, prefill)
    batches = workers * (1 + prefill.alone / prefill.passes)
    usual = _reached(lambda many: prefill.rate_rps(workers, many, blind), rate, batches)
    prompts = _steps(usual, rate, most, horizon_s, prefill.spread)
    done = prefill.rate_rps(workers, np.maximum(prompts, _TINY), blind)
    queued = prompts > workers
    arriving = _chances(_log(rate) - _log(done), prompts, queued, 1 / prefill.spread, (rate >= most) & queued)
    varies_s = np.zeros_like(requests)  # what they hold makes their number vary here, see `spread`
    return Populations(rate[:, 0], prompts, arriving, requests, running, varies_s, delay_s, blind)


def closed(
    users: int, think_s: float, prefill: Prefill, decode: Decode, workers: Floats, beside: Floats
) -> Populations:
    """Return the pools under users who each ask again when they have had their answer and thought.

    Births in the prefill pool are what the rest of the loop, decode and thought, gets done with those that
    are not in it; an arrival finds what the others left, so chances are weighed with births.
    """
    states = np.unique(np.linspace(0, users, min(users, STATES) + 1).round())
    prompts = np.broadcast_to(states, (len(workers), len(states)))
    there, births = _rest(users - prompts, think_s, decode, beside)
    delay_s = decode.delay_s(beside, there)
    into = np.concatenate((births[:, :1], births[:, :-1]), axis=1)  # from the state before
    blind = np.zeros_like(workers)
    for _ in range(2):  # who is blind depends on how many decode, a little
        done = prefill.rate_rps(workers, np.maximum(prompts, _TINY), blind)
        ratios = _log(into) - _log(done)
        chances = _chances(ratios, prompts, prompts > workers, 1 / prefill.spread, prompts < 0)
        running = _weighed(chances, births)
        blind = _blind(delay_s, running, prefill)
    rate = (chances * births).sum(axis=1)
    arriving, varies_s = _weighed(chances, births), decode.varies_s(beside, there)
    return Populations(rate, prompts, arriving, there, running, varies_s, delay_s, blind)


def _blind(delay_s: Floats, running: Floats, prefill: Prefill) -> Floats:
    after_s: Floats = (delay_s * running).sum(axis=1, keepdims=True)
    return after_s / (after_s + prefill.tokens_s + prefill.base_s * prefill.alone)


def waited(
    prefill: Prefill, blind: float, workers: float, prompts: Floats, chances: Floats, times_s: Floats
) -> Floats:
    """Return the chance that an arrival's worker begins with it within each of `times_s`, at one split.

        P(wait <= k * prompt_s) = (1 - chance) * [floor(n / m) <= k] + chance * P(Poisson(n / m) <= k)

    chance = blind * (1 - 1 / m), linear between. A router sends a prompt to a worker at once, and it waits
    for that worker, even if another is free sooner: for the `floor(n / m)` that are before it on the least
    loaded, or for as many as there are by chance on any.

    Args:     prompts, chances: `(s,)`, populations found.
    """
    found = chances > _RARE
    each, chances = prompts[found] / workers, chances[found]
    each_s = prefill.prompt_s(each)
    first_s = 2 * prefill.spread * each_s  # the one that runs is half done, and more likely a long one
    ahead = np.minimum(times_s[:, None] / first_s, 1.0) + np.maximum(times_s[:, None] - first_s, 0.0) / each_s
    below = np.minimum(ahead, _MOST).astype(np.intp)
    part = np.minimum(ahead - below, 1.0)
    mean = np.minimum(np.rint(each * _PARTS), _MOST * _PARTS).astype(np.intp)
    table = _poisson()
    random = (1 - part) * table[below, mean] + part * table[below + 1, mean]
    chosen = np.clip(ahead - np.floor(each) + 1, 0.0, 1.0)
    chance = blind * (1 - 1 / workers)  # one worker has all
    within: Floats = ((1 - chance) * chosen + chance * random) @ chances
    return within


@functools.cache
def _poisson() -> Floats:
    """Return the chance of at most so many, by row, where so many _PARTS are the mean, by column."""
    return np.asarray(pdtr(np.arange(_MOST + 2)[:, None], np.arange(_MOST * _PARTS + 1) / _PARTS))


def _reached(done_rps: Callable[[Floats], Floats], rate_rps: Floats, most: Floats) -> Floats:
    """Return the population that gets done as many as come, or `most`; more are done of more."""
    low, high = np.zeros_like(most), most
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        enough = done_rps(np.maximum(middle, _TINY)) >= rate_rps
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def _steps(usual: Floats, rate_rps: Floats, most_rps: Floats, horizon_s: float, spread: float) -> Floats:
    """Return populations from 0 to what may come together in `horizon_s`, `(k, STATES)`.

    What is over capacity adds up. So does chance: to about sqrt(2 * rate * horizon) at capacity, and below it
    until longer queues are rare.
    """
    rare = -math.log(_RARE) * spread / np.maximum(-np.log(rate_rps / most_rps), _TINY)
    grown = np.maximum(rate_rps - most_rps, 0.0) * horizon_s + np.minimum(
        rare, np.sqrt(2 * rate_rps * horizon_s)
    )
    step = np.maximum(np.ceil((_USUALLY * usual + grown) / (STATES - 1)), 1.0)
    return step * np.arange(STATES)


def _chances(
    log_ratios: Floats, populations: Floats, varies: NDArray[np.bool_], theta: float, over: NDArray[np.bool_]
) -> Floats:
    """Return the chance of each population from births over deaths; rows sum to 1.

    Where `varies`, the population varies by 1 / `theta` as much as if work were exponential. Where `over`
    capacity, all lengths that a queue grows through are as likely.
    """
    step = populations[:, 1:2] - populations[:, :1]
    logs = np.where(varies, log_ratios * theta, log_ratios)
    logs = np.where(over, np.minimum(logs, 0.0), logs) * step
    logs[:, 0] = 0.0
    logs = np.cumsum(logs, axis=1)
    chances: Floats = np.exp(logs - logs.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    return chances


def _log(rate_rps: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(rate_rps, _TINY))
    return logs


def _weighed(chances: Floats, rates: Floats) -> Floats:
    weights: Floats = chances * rates
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), _TINY)
    return weights


def _rest(others: Floats, think_s: float, decode: Decode, workers: Floats) -> tuple[Floats, Floats]:
    """Return how many of the others decode, and the rate at which they come back.

    others = there + rate(there) * think_s        read backwards, from a table
    """
    there = others
    if think_s > 0:
        known = np.sort(others, axis=1)
        needed = known + decode.rate_rps(workers, known) * think_s
        there = np.stack([np.interp(*row) for row in zip(others, needed, known, strict=True)])
    return there, decode.rate_rps(workers, there)
