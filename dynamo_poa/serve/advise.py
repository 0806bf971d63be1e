"""What split of workers would serve a recording or a trace best, by the code that advises live.

Owns: reading the game off a recording, or off a trace beside the speed of workers.
Does not own: a trace's demand (trace_demand.py), speeds (pool_speeds.py), the estimate (split.py), what is
              worth advising (advice.py), its looks (advised.py).
Invariant: the same files give the same answer; what is assumed rather than measured is told in `notes`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dynamo_poa.advice import worth_it
from dynamo_poa.config import SloConfig
from dynamo_poa.coupling import Advice, AllocationEstimate, Split
from dynamo_poa.errors import ConfigError
from dynamo_poa.output_tokens import decoded_requests
from dynamo_poa.prompts import PROMPT, REQUESTS, UNCACHED, Floats
from dynamo_poa.serve.playback import Playback, usual_log
from dynamo_poa.serve.trace_demand import BLOCK_TOKENS, demand_of
from dynamo_poa.split import Game, price_split, read_game
from dynamo_poa.values import Curve, Role, WorkerCard, WorkerKey
from dynamo_poa.wire import ForwardPass
from dynamo_poa.workloads.trace import survey

MAX_WORKERS = 500  # of a kind
KV_BLOCKS, KV_BLOCK_TOKENS = 16_384, 16  # of a worker, unless told: the mock engine's


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked: requests a second and tokens of a request, means; None where it is not known."""

    seconds: int
    rps: float
    prompt_tokens: float | None
    uncached_tokens: float | None
    output_tokens: float | None


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: what was asked, what splits give, and the change that is better beyond noise, if one is."""

    source: str
    slo: SloConfig
    asked: Asked
    allocation: AllocationEstimate
    advice: Advice | None
    notes: tuple[str, ...] = ()


def of_recording(path: Path, block_size: int, slo: SloConfig) -> Advised:
    """Return what the whole of a recording says.

    Raises:  RecordingError when the file is not a recording, or nothing in it is of use.
    """
    decoded, held = Counter[Role](), Counter[Role]()

    def on_pass(key: WorkerKey, card: WorkerCard, done: ForwardPass, at_s: float) -> None:
        decoded[card.role] += done.decode_requests
        held[card.role] += done.decode_kv_tokens

    playback = Playback(
        path,
        block_size=block_size,
        make_log=usual_log(block_size, math.inf),
        on_pass=on_pass,
    )
    cards: dict[int, WorkerCard] = {}
    for _ in playback.instants():
        present = {worker.key.worker_id: worker.card for worker in playback.workers if not worker.stale}
        if {card.role for card in present.values()} >= {card.role for card in cards.values()}:
            cards = present  # not those that stop when the recording does
    prompts, end_s = playback.log.prompts, playback.at_s + 1
    seconds, in_flight = prompts.seconds(end_s), prompts.in_flight(end_s)
    busy = np.flatnonzero(seconds[:, REQUESTS])
    count = int(busy[-1]) + 1 if len(busy) else 0
    ended = decoded_requests(playback.log.outcomes)[Role.DECODE]
    output_tokens = decoded[Role.DECODE] / ended if ended and decoded[Role.DECODE] else None
    notes = tuple(f"{name}: {count}" for name, count in playback.inexact.items())
    game = read_game(
        cards.values(),
        playback.curves,
        seconds[:count],
        output_tokens,
        slo,
        context_tokens=held[Role.DECODE] / decoded[Role.DECODE] if held[Role.DECODE] else None,
        in_flight=in_flight[:count],
    )
    return _answer(str(path), game, seconds[:count], output_tokens, slo, notes)


def of_trace(
    path: str,
    split: Split,
    curves: Mapping[Role, Curve],
    slo: SloConfig,
    *,
    kv_blocks: int = KV_BLOCKS,
    rate_rps: float | None = None,
    notes: Sequence[str] = (),
) -> Advised:
    """Return what a trace says of workers that are as fast as these curves.

    Args:    kv_blocks: of a worker, of 16 tokens.  rate_rps: mean, instead of the file's own.
    Raises:  ConfigError on a bad trace, or one without times when no rate is given.
    """
    left_out = survey(path, BLOCK_TOKENS).text
    seconds, output_tokens = demand_of(path, kv_blocks * KV_BLOCK_TOKENS * split.prefill, rate_rps)
    roles = [Role.PREFILL] * split.prefill + [Role.DECODE] * split.decode
    cards = [
        WorkerCard(worker_id=number, role=role, kv_block_size=KV_BLOCK_TOKENS, total_kv_blocks=kv_blocks)
        for number, role in enumerate(roles)
    ]
    assumed = f"a prompt's prefix is cached where one cache as large as those of {split.prefill}P has it"
    told = (assumed, *notes, *((left_out,) if left_out else ()))
    game = read_game(cards, curves, seconds, output_tokens, slo)
    return _answer(path, game, seconds, output_tokens, slo, told)


def read_split(topology: str) -> Split:
    """Return the split that 3P/5D stands for.

    Raises:  ConfigError naming the value and the bound.
    """
    found = re.fullmatch(r"(\d{1,4})P/(\d{1,4})D", topology, re.ASCII)
    counts = [int(count) for count in found.groups()] if found else []
    if not counts or min(counts) < 1 or max(counts) > MAX_WORKERS:
        bound = f"must be like 3P/5D, with 1 to {MAX_WORKERS} workers of a kind"
        raise ConfigError([f"--topology = {topology!r}: {bound}"])
    return Split(*counts)


def _answer(
    source: str,
    game: Game | str,
    seconds: Floats,
    output_tokens: float | None,
    slo: SloConfig,
    notes: tuple[str, ...],
) -> Advised:
    sums = seconds.sum(axis=0)
    requests = float(sums[REQUESTS])
    allocation = price_split(game)
    return Advised(
        source=source,
        slo=slo,
        asked=Asked(
            seconds=len(seconds),
            rps=requests / len(seconds) if len(seconds) else 0.0,
            prompt_tokens=float(sums[PROMPT]) / requests if requests else None,
            uncached_tokens=float(sums[UNCACHED]) / requests if requests else None,
            output_tokens=output_tokens,
        ),
        allocation=allocation,
        advice=worth_it(allocation),
        notes=notes,
    )
