"""`python -m dynamo_poa.bench.suites.allocation_inputs --traces DIR`: what is predicted from.

Owns: what is measured of each workload of the suite `allocation`, and the file it is kept in: objectives; at
      each split the mix, of which users and thought are the workload's own, and the curves that LatencyBook
      fits; at the middle one what a controller reads of a minute, nothing of which is the workload's own.
Does not own: the workloads (allocation.py), the fit (latency.py).
Invariant: nothing comes from the simulator's source. The simulator tells of requests, not of passes, so a
           prompt's passes are its time and tokens shared out among as many as its batch takes, and a
           request's iterations are one of its mean length beside the mean of what decoded on its worker.
"""

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dynamo_poa.bench.report import this_machine
from dynamo_poa.bench.suites import allocation, baselines, replayed
from dynamo_poa.bench.suites.allocation import FLEETS, MIDDLE, Asked, Inputs, Known, Measured, Minute
from dynamo_poa.bench.suites.cells import Cell, Fleet
from dynamo_poa.bench.suites.figures import WARM_UP_FRAC
from dynamo_poa.bench.suites.replayed import Record
from dynamo_poa.bench.suites.written import write
from dynamo_poa.config import ControllerConfig, SloConfig
from dynamo_poa.games.allocation import Mix
from dynamo_poa.latency import LatencyBook
from dynamo_poa.prompts import PromptWindow
from dynamo_poa.values import Role, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import Chosen, ForwardPass
from dynamo_poa.workloads import stream
from dynamo_poa.workloads.arrivals import Closed, Load

SEED = 900_001  # of no suite
UNLOADED_REQUESTS = 60
READ_RUN_S = 120.0  # a minute to read, with as much before and after as it takes
MILLI = 1e-3


class Pass(msgspec.Struct, frozen=True):
    """What a forward pass did and how long it took."""

    wall_s: float
    prefill_tokens: float = 0.0
    decode_requests: float = 0.0
    decode_kv_tokens: float = 0.0


def prefill_passes(records: Iterable[Record], batch_tokens: int) -> Iterator[Pass]:
    """Yield one pass for each request: of the several that a long prompt takes, the mean."""
    for record in records:
        if record.source_held_ms is not None and record.prefill_admit_ms is not None:
            tokens = _uncached(record)
            count = math.ceil(tokens / batch_tokens)
            seconds = (record.source_held_ms - record.prefill_admit_ms) * MILLI
            yield Pass(seconds / count, prefill_tokens=tokens / count)


def decode_passes(records: Iterable[Record]) -> Iterator[Pass]:
    """Yield one pass for each request: its mean time between tokens, beside the mean of what decoded."""
    by_worker: dict[int, list[Record]] = {}
    for record in records:
        if record.itl_ms and record.decode_worker_idx is not None:
            by_worker.setdefault(record.decode_worker_idx, []).append(record)
    for members in by_worker.values():
        begin = np.array([record.decode_admit_ms for record in members], dtype=np.float64)
        end = np.array([record.terminal_time_ms for record in members], dtype=np.float64)
        held = np.array([_context(record) for record in members])
        together = np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin)
        beside = np.clip(together, 0.0, None) / (end - begin)[:, None]
        for record, requests, tokens in zip(members, beside.sum(axis=1), beside @ held, strict=True):
            assert record.itl_ms is not None
            yield Pass(record.itl_ms * MILLI, decode_requests=float(requests), decode_kv_tokens=float(tokens))


def fitted(passes: Iterable[Pass], role: Role, fleet: Fleet) -> WorkerLatency:
    """Return what LatencyBook makes of passes that all count alike."""
    book, key = LatencyBook(half_life_s=1e9), WorkerKey(1, 0)
    card = WorkerCard(
        worker_id=1, role=role, kv_block_size=fleet.block_tokens, total_kv_blocks=fleet.kv_blocks
    )
    for number, one in enumerate(passes, 1):
        done = ForwardPass(
            1,
            0,
            number,
            one.wall_s,
            int(one.prefill_tokens > 0),
            one.prefill_tokens,  # type: ignore[arg-type]  # a mean
            0,
            one.decode_requests,  # type: ignore[arg-type]
            one.decode_kv_tokens,  # type: ignore[arg-type]
            0,
            0,
            0,
            0,
        )
        book.observe(key, card, done, 0.0)
        if not number % 1024:
            book.fit(0.0, [(key, role)])
    return book.fit(0.0, [(key, role)])[key]


def mix_of(records: Sequence[Record], load: Load, think_s: float = 0.0) -> Mix:
    """Return what was asked, of the requests that the suite's figures are of.

    What a request holds counts as long as it holds it: by its output.

    Args:  think_s: of a closed loop's users before a request, mean.
    """
    ordered = sorted(records, key=lambda record: record.arrival_time_ms)
    measured = ordered[int(len(ordered) * WARM_UP_FRAC) :]
    uncached = np.array([_uncached(record) for record in measured])
    output = np.array([record.output_length for record in measured], dtype=np.float64)
    held = np.array([_context(record) for record in measured])
    last_s = ordered[-1].arrival_time_ms * MILLI
    users = load.users if isinstance(load, Closed) else 0
    seconds = last_s - measured[0].arrival_time_ms * MILLI
    return Mix(
        uncached_tokens=float(uncached.mean()),
        uncached_squared=float((uncached**2).mean()),
        context_tokens=float((output @ held) / output.sum()),
        context_squared=float((output @ held**2) / output.sum()),
        output_tokens=float(output.mean()),
        arrival_rps=0.0 if users else len(measured) / seconds,
        users=users,
        think_s=think_s if users else 0.0,
        horizon_s=last_s,
    )


def objectives(records: Sequence[Record]) -> SloConfig:
    """Return UNLOADED_TIMES the means of requests that had no other beside them."""
    ttft_s = [record.ttft_ms * MILLI for record in records if record.ttft_ms is not None]
    itl_s = [record.itl_ms * MILLI for record in records if record.itl_ms]
    times = allocation.UNLOADED_TIMES
    return SloConfig(ttft_s=times * float(np.mean(ttft_s)), itl_s=times * float(np.mean(itl_s)))


def measure(asked: Asked, fleet: Fleet) -> Measured:
    """Return a workload's demand and the speed of workers at one split."""
    cell = _cell(asked, fleet)
    records = replayed.records(cell)
    prefill = fitted(prefill_passes(records, fleet.max_num_batched_tokens), Role.PREFILL, fleet)
    decode = fitted(decode_passes(records), Role.DECODE, fleet)
    return Measured(
        mix=mix_of(records, asked.load, _thought_s(cell)),
        prefill=prefill.curve,
        decode=decode.curve,
        residual_frac=(prefill.residual_frac or 0.0, decode.residual_frac or 0.0),
    )


def minute(asked: Asked) -> Minute:
    """Return what a controller reads of a workload at the middle split, three quarters into a long run.

    A loop's last users are few, and its caches are cold at first: neither is in the minute.
    """
    cell = _cell(asked, MIDDLE)
    short = replayed.records(cell)
    lasts_s = max(record.arrival_time_ms for record in short) * MILLI
    long = short
    if not asked.is_trace:  # which is as long as it is
        count = math.ceil(len(short) * READ_RUN_S / lasts_s)
        long = replayed.records(msgspec.structs.replace(cell, requests=count))
    return read_minute(long, (eighths_rps(short), eighths_rps(long)))


def read_minute(records: Sequence[Record], eighths: tuple[tuple[float, ...], tuple[float, ...]]) -> Minute:
    """Return what PromptWindow and OutputTokens hold three quarters into a run."""
    ordered = sorted(records, key=lambda record: record.arrival_time_ms)
    at_s = math.floor(0.75 * ordered[-1].arrival_time_ms * MILLI)
    window_s = ControllerConfig().estimate_window_s
    window = PromptWindow(window_s)
    for record in ordered:
        if (came_s := record.arrival_time_ms * MILLI) < at_s:
            window.add(_chosen(record), came_s)
    begins = np.array([record.arrival_time_ms for record in ordered]) * MILLI
    ends = np.array([record.terminal_time_ms or record.arrival_time_ms for record in ordered]) * MILLI
    for second in range(at_s):
        window.look(lambda now=second: int(((begins <= now) & (now < ends)).sum()), second)  # type: ignore[misc]
    ended = [record for record, end_s in zip(ordered, ends, strict=True) if at_s - window_s <= end_s < at_s]
    output = np.array([record.output_length for record in ended], dtype=np.float64)
    held = np.array([_context(record) for record in ended])
    return Minute(
        seconds=tuple(map(tuple, window.seconds(at_s).tolist())),
        in_flight=tuple(window.in_flight(at_s).tolist()),
        output_tokens=float(output.mean()),
        context_tokens=float((output @ held) / output.sum()),
        eighths_rps=eighths,
    )


def eighths_rps(records: Iterable[Record]) -> tuple[float, ...]:
    """Return arrivals a second in each eighth of a run, by its time up to the last one."""
    counts, edges = np.histogram([record.arrival_time_ms * MILLI for record in records], bins=8)
    return tuple((counts / np.diff(edges)).tolist())


def _chosen(record: Record) -> Chosen:
    return Chosen(
        request_id="",
        role=Role.PREFILL,
        at_s=0.0,
        received_at_s=0.0,
        worker_id=0,
        dp_rank=0,
        prompt_tokens=record.input_length,
        revision=0,
        attempt=1,
        candidates=(),
        cached_tokens=record.reused_input_tokens,
    )


def unloaded(asked: Asked) -> SloConfig:
    """Return a workload's objectives: one user on the middle split."""
    cell = _cell(asked, MIDDLE)
    content = cell.content
    if asked.is_trace:
        content = msgspec.structs.replace(content, limit=UNLOADED_REQUESTS)
    alone = msgspec.structs.replace(cell, content=content, load=Closed(users=1), requests=UNLOADED_REQUESTS)
    return objectives(replayed.records(alone))


def _cell(asked: Asked, fleet: Fleet) -> Cell:
    content = asked.content
    if asked.is_trace:
        content = msgspec.structs.replace(content, part="first")
    return Cell(
        suite=allocation.SUITE,
        engine="replay",
        fleet=fleet,
        content=content,
        load=asked.load,
        policy=baselines.DEFAULT,
        seed=SEED,
        requests=asked.requests,
    )


def _thought_s(cell: Cell) -> float:
    """Return how long users think before a request, mean: before a session's first they do not."""
    block_tokens = stream.block_tokens_of(cell.content, cell.fleet.block_tokens)
    asked = stream.requests(cell.content, cell.load, cell.seed, block_tokens)
    return float(np.mean([request.think_s for request in itertools.islice(asked, cell.requests or None)]))


def _uncached(record: Record) -> float:
    return float(max(record.input_length - record.reused_input_tokens, 1))  # the last is always computed


def _context(record: Record) -> float:
    return record.input_length + record.output_length / 2


def main(argv: list[str] | None = None) -> int:
    """Measure every workload at every split and write the file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="dynamo_poa.bench.suites.allocation_inputs", description="Measure what predictions are made from"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of Mooncake's traces")
    parser.add_argument("--out", type=Path, default=allocation.INPUTS, metavar="FILE")
    arguments = parser.parse_args(argv)
    return write(arguments.out, lambda: _measured(allocation.workloads(arguments.traces)))


def _measured(asked: Sequence[Asked]) -> str:
    """Return the file: every workload at every split."""
    with replayed.pool() as pool:
        slos = [pool.submit(unloaded, one) for one in asked]
        runs = [[pool.submit(measure, one, fleet) for fleet in FLEETS] for one in asked]
        minutes = [pool.submit(minute, one) for one in asked]
        known = {
            one.name: Known(
                slo=slo.result(),
                at={fleet.name: run.result() for fleet, run in zip(FLEETS, of_one, strict=True)},
                minute=read.result(),
            )
            for one, slo, of_one, read in zip(asked, slos, runs, minutes, strict=True)
        }
    inputs = Inputs(
        command="python -m dynamo_poa.bench.suites.allocation_inputs --traces DIR",
        packages=dict(this_machine().packages),
        workloads=known,
    )
    return file_of(inputs)


def file_of(inputs: Inputs) -> str:
    """Return the file's text, a list of numbers on one line."""
    text = msgspec.json.format(msgspec.json.encode(inputs)).decode()
    return re.sub(r"\[[^][\"{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
