"""One cell on Dynamo's simulator, in virtual time: what static parameters and the built-in modes do.

Owns: how a cell becomes a trace file and the simulator's arguments; what cannot be replayed and why; the
      processes it runs in.
Does not own: the figures' arithmetic (figures.py), which cells there are (catalogue.py).
Invariant: what the simulator cannot do is refused, never approximated; times are each request's own; every
          request that was asked is in the figures, as answered or as failed. A process dies with its parent,
          however that dies, and leaves no file.
Source:   host: dynamo/replay; Linux prctl(2), PR_SET_PDEATHSIG. Measured on ai-dynamo 1.4.2: 4,000 requests
          of 64 tokens take 0.5 s. Runs of the same cell differ, for Dynamo breaks ties by chance and takes no
          seed: mean TTFT by 0.03 % at light load, by up to 7 % at capacity, so one run there says nothing.
"""

import atexit
import ctypes
import functools
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dynamo_poa import dynamo_host
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.suites import profiles
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result
from dynamo_poa.bench.suites.figures import Served, attained_figures, figures_of
from dynamo_poa.errors import ConfigError, ReplayError
from dynamo_poa.telemetry import configure_logging
from dynamo_poa.values import Role
from dynamo_poa.workloads import stream, trace
from dynamo_poa.workloads.arrivals import Closed, Load
from dynamo_poa.workloads.synthetic import Content, Trace

PROCESSES = 2
_PR_SET_PDEATHSIG = 1
MODES = ("kv", "round-robin", "random")


class Record(msgspec.Struct, frozen=True):
    """What Dynamo writes of one request, as far as it is read; times are null of what it refused.

    *_admit_ms:      when either worker began with it, disaggregated
    source_held_ms:  when its prompt was computed, disaggregated
    """

    terminal_status: str
    arrival_time_ms: float
    terminal_time_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    e2e_latency_ms: float | None
    input_length: int
    output_length: int
    reused_input_tokens: int
    prefill_worker_idx: int | None
    decode_worker_idx: int | None
    prefill_admit_ms: float | None = None
    source_held_ms: float | None = None
    decode_admit_ms: float | None = None

    @property
    def served(self) -> Served:
        """Return the same in seconds; a request that was refused has no times."""
        return Served(
            ttft_s=(self.ttft_ms or 0.0) / 1000,
            itl_s=None if self.itl_ms is None else self.itl_ms / 1000,
            e2e_s=(self.e2e_latency_ms or 0.0) / 1000,
            output_tokens=self.output_length,
            input_tokens=self.input_length,
            cached_tokens=self.reused_input_tokens,
            ok=self.terminal_status == "completed" and self.ttft_ms is not None,
        )


def check(cell: Cell) -> None:
    """Refuse what the simulator cannot do.

    Raises:  ConfigError listing every reason.
    """
    fleet, policy = cell.fleet, cell.policy
    refused = [
        why
        for wrong, why in (
            (
                cell.requests < 1 and not isinstance(cell.content, Trace),
                f"requests = {cell.requests}: must be >= 1, for only a trace ends by itself",
            ),
            (bool(cell.phases), "phases: the simulator keeps one load"),
            (bool(fleet.slow), "fleet.slow: all simulated workers are equally fast"),
            (fleet.stall is not None, "fleet.stall: simulated workers do not stall"),
            (fleet.routers != 1, f"fleet.routers = {fleet.routers}: the simulator has one router"),
            (
                bool(policy.plugin),
                f"policy.plugin = {policy.plugin!r}: the simulator has Dynamo's own router",
            ),
            (
                policy.router_mode not in MODES,
                f"policy.router_mode = {policy.router_mode!r}: the simulator offers {', '.join(MODES)}",
            ),
            (
                not fleet.prefill and fleet.decode == 1 and policy.router_mode != "round-robin",
                f"fleet = 1A: the simulator routes {policy.router_mode} among two workers or more",
            ),
            (
                isinstance(cell.load, Closed) and cell.load.think_s > 0,
                "load.think_s: simulated users ask again at once",
            ),
        )
        if wrong
    ]
    if refused:
        raise ConfigError([f"cannot be replayed: {why}" for why in refused])


def run(cell: Cell) -> Result:
    """Run a cell in this process and say what came of it.

    Raises:  ConfigError for what the simulator cannot do.
    """
    check(cell)
    started_s = time.monotonic()
    figures: dict[str, float] = {}
    picks: dict[str, int] = {}
    reason = ""
    try:
        told = records(cell)
        first_ms = min(record.arrival_time_ms for record in told)
        last_ms = max(record.terminal_time_ms or first_ms for record in told)
        figures = figures_of([record.served for record in told], (last_ms - first_ms) / 1000)
        if cell.slo is not None:
            arrivals = [(record.arrival_time_ms / 1000, record.served) for record in told]
            figures |= attained_figures(arrivals, cell.slo)
        picks = _picks(told, cell.fleet)
    except (ReplayError, MeasurementError) as error:
        reason = str(error)
    return Result(
        cell=cell,
        state="failed" if reason else "done",
        reason=reason,
        figures=figures,
        picks=picks,
        wall_s=time.monotonic() - started_s,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def pool(processes: int = PROCESSES) -> Iterator[ProcessPoolExecutor]:
    """Offer processes to `submit(run, cell)` to: quiet, deaf to Ctrl-C, with Dynamo imported once each."""
    before = os.environ.get("DYN_LOG")
    os.environ["DYN_LOG"] = "off"  # read when Dynamo is imported, so before the processes exist
    spawn = multiprocessing.get_context("spawn")  # Dynamo's threads do not survive a fork
    executor = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_settle, initargs=(os.getpid(),))
    try:
        _start(executor, processes)
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["DYN_LOG"]
        else:
            os.environ["DYN_LOG"] = before


def _start(executor: ProcessPoolExecutor, processes: int) -> None:
    """Start the processes with Ctrl-C held back: they need a second until they can be deaf to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a new process is born with it
    try:
        with suppress(BrokenProcessPool):  # whoever submits a cell is told
            for _ in range(processes):
                executor.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption ends
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # died before it could be asked for
        _end()
    configure_logging("error")  # a trace's bad lines are told once, by the parent
    if os.isatty(2):  # where Dynamo draws a progress bar of its own over ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _end(*_: object) -> None:
    """End this process at once: an orphan of a pool would wait for its next job for ever."""
    shutil.rmtree(_folder(), ignore_errors=True)
    os._exit(1)  # an exception would only end the job


def records(cell: Cell) -> list[Record]:
    """Return what Dynamo tells of each request.

    Raises:  ReplayError with what Dynamo said, MeasurementError when it did not tell all.
    """
    block_tokens = stream.block_tokens_of(cell.content, cell.fleet.block_tokens)
    source, asked = _trace_file(cell.content, cell.load, cell.seed, cell.requests, block_tokens)
    target = source.with_suffix(".records")
    dynamo_host.replay_trace(
        source,
        target,
        trace_block_tokens=block_tokens,
        workers=_workers(cell.fleet),
        engine=engine_args(cell.fleet),
        router=router_config(cell.policy),
        users=cell.load.users if isinstance(cell.load, Closed) else None,
        prefill_engine={"max_num_seqs": at_once} if (at_once := cell.fleet.prefill_at_once) else None,
    )
    try:
        with target.open("rb") as file:
            decode = msgspec.json.Decoder(Record).decode
            told = [decode(line) for line in file]
    except msgspec.MsgspecError as error:  # another Dynamo, or no room for all of it
        raise MeasurementError(f"a record of Dynamo's cannot be read: {error}") from error
    if len(told) != asked:
        raise MeasurementError(f"Dynamo told of {len(told)} requests, not of all {asked} that were asked")
    return told


@functools.lru_cache(maxsize=1)  # cells of one workload come one after another
def _trace_file(
    content: Content, load: Load, seed: int, requests: int, block_tokens: int
) -> tuple[Path, int]:
    """Write what is asked; return the file and how many requests it holds."""
    path = _folder() / "trace.jsonl"
    asked = itertools.islice(stream.requests(content, load, seed, block_tokens), requests or None)
    return path, trace.write_mooncake(asked, block_tokens, path)


@functools.cache
def _folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="dynamo-poa-replay-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _workers(fleet: Fleet) -> dict[Role, int]:
    if not fleet.prefill:
        return {Role.AGGREGATED: fleet.decode}
    return {Role.PREFILL: fleet.prefill, Role.DECODE: fleet.decode}


def engine_args(fleet: Fleet) -> dict[str, Any]:
    """Return what each simulated worker is told."""
    args: dict[str, Any] = {
        "block_size": fleet.block_tokens,
        "num_gpu_blocks": fleet.kv_blocks,
        "max_num_seqs": fleet.max_num_seqs,
        "max_num_batched_tokens": fleet.max_num_batched_tokens,
        "speedup_ratio": fleet.speedup,
    }
    if fleet.host_blocks:
        args["num_g2_blocks"] = fleet.host_blocks
    if fleet.profile:
        args["planner_profile_data"] = profiles.path_of(fleet.profile)
    return args


def router_config(policy: Policy) -> dict[str, float] | None:
    """Return the KV router's settings; None for round-robin. `random` is the KV router at τ without end."""
    if policy.router_mode == "round-robin":
        return None
    return {
        "router_temperature": math.inf if policy.router_mode == "random" else policy.router_temperature,
        "overlap_score_credit": policy.overlap_credit,
        "overlap_score_credit_decay": policy.credit_decay,
        "prefill_load_scale": policy.prefill_load_scale,
    }


def _picks(records: list[Record], fleet: Fleet) -> dict[str, int]:
    """Return how often each worker was chosen, also those that never were."""
    prefills = Counter(record.prefill_worker_idx for record in records)
    decodes = Counter(record.decode_worker_idx for record in records)
    decode = "decode" if fleet.prefill else "aggregated"
    return {f"prefill-{n}": prefills[n] for n in range(fleet.prefill)} | {
        f"{decode}-{n}": decodes[n] for n in range(fleet.decode)
    }
