"""What `estimate` says of a recording, and how a person reads it.

Owns: the report's fields, which are its JSON, and its tables.
Does not own: the figures (replay.py, speeds.py).
Invariant: what is inexact or was not understood is shown beside the figures it concerns; the frozen estimate
           has a column of its own and is never mixed with the calibrated one.
"""

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_poa.recording import Header
from dynamo_poa.serve.show import UNKNOWN, counts, number, percent, seconds
from dynamo_poa.serve.speeds import PoolSpeed, WorkerSpeed
from dynamo_poa.values import Estimate, Shares, TtftSample


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one stretch of time.

    from_s, to_s:  since the first message
    poa:           calibrated, on the snapshots of the last `estimate_window_s` at the end of the period
    frozen:        the paper's, on the last `window` decisions of each leg; another series
    ttft:          of requests that got their first token in the period
    """

    from_s: float
    to_s: float
    poa: Estimate
    frozen: Estimate
    ttft: TtftSample


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `estimate` says.

    overall:   the whole recording: all snapshots; frozen as the mean over consecutive windows
    periods:   those that decisions came in
    pools, workers:  how fast they were; at the end of the recording
    legs:      ended legs by role and outcome
    messages:  by topic; `unknown` are subjects of neither Dynamo nor us
    skipped:   lines of the file that are no message, by reason
    notes:     what makes the figures less than exact, by what it is; empty when nothing does
    """

    header: Header | None
    window: int
    block_size: int
    estimate_s: float
    estimate_window_s: float
    overall: Period
    periods: tuple[Period, ...]
    pools: tuple[PoolSpeed, ...]
    workers: tuple[WorkerSpeed, ...]
    legs: dict[str, dict[str, int]]
    messages: dict[str, int]
    unknown: dict[str, int]
    skipped: dict[str, int]
    notes: dict[str, int]


def report_view(report: Report) -> RenderableType:
    """Return the report as a person reads it."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    header = report.header
    source = f"namespace {header.namespace}, dynamo-poa {header.version}" if header else "no header"
    yield Text(f"recording  {report.overall.to_s:.1f} s ({source})")
    yield Text(f"messages   {counts(report.messages)}")
    if report.periods:
        yield _periods(report)
    overall = report.overall
    yield from _estimate(overall.poa)
    yield Text(f"frozen     {_frozen(report)}")
    ttft = overall.ttft
    yield Text(f"TTFT       P50 {seconds(ttft.p50_s)}, P99 {seconds(ttft.p99_s)} of {ttft.samples} requests")
    for role, outcomes in report.legs.items():
        yield Text(f"{role:<10} {counts(outcomes)}")
    for pool in report.pools:
        yield Text(f"{pool.role:<10} {_pool(pool)}")
    if report.workers:
        yield _workers(report)
    for name, found in (("skipped", report.skipped), ("unknown", report.unknown), ("inexact", report.notes)):
        if found:
            yield Text(f"{name:<10} {counts(found)}")


def _estimate(poa: Estimate) -> Iterator[Text]:
    if poa.poa_hat is None:
        yield Text(f"PoA-hat    none: {poa.reason}")
        return
    yield Text(
        f"PoA-hat    {number(poa.poa_hat, 4)} (95 % {_interval(poa, 4)}) of {poa.samples} snapshots with "
        f"{poa.requests:.1f} requests: {seconds(poa.observed_s)} as it was, {seconds(poa.optimal_s)} at best"
    )
    if poa.reason:
        yield Text(f"lacking    {poa.reason}")
    yield Text(f"excess     {shares_text(poa.shares)}")
    for role, leg in poa.legs.items():
        if leg.poa_hat is not None:
            yield Text(
                f"{role:<10} {number(leg.poa_hat, 4)} (95 % {_interval(leg, 4)}) of {leg.samples}; "
                f"{shares_text(leg.shares)}"
            )


def shares_text(shares: Shares | None) -> str:
    """Return in words where the cost beyond an unloaded system comes from."""
    if shares is None:
        return "no cost beyond an unloaded system"
    return (
        f"miss {percent(shares.miss)}, congestion {percent(shares.congestion)}, "
        f"capacity {percent(shares.capacity)}"
    )


def _frozen(report: Report) -> str:
    found = report.overall.frozen
    if found.poa_hat is None:
        return f"none: {found.reason}"
    legs = [f"{role} {value:.4f}" for role, value in found.by_role.items()] + [found.reason] * bool(
        found.reason
    )
    how = f"window {report.window}, block size {report.block_size}"
    return f"{found.poa_hat:.4f} of {found.samples} decisions ({', '.join(legs)}); {how}"


def _pool(pool: PoolSpeed) -> str:
    parts = [f"{pool.workers} workers, {pool.passes} forward passes"]
    if pool.prefill_s is not None:
        parts.append(f"typically {number(pool.prefill_tokens, 1)} prompt tokens in {seconds(pool.prefill_s)}")
    if pool.iteration_s is not None:
        parts.append(
            f"typically {number(pool.decode_requests, 1)} requests with {number(pool.decode_kv_tokens, 0)} "
            f"KV tokens in {seconds(pool.iteration_s)}"
        )
    return "; ".join(parts)


def _periods(report: Report) -> Table:
    roles = list(dict.fromkeys(role for period in report.periods for role in period.poa.legs))
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ("from s", "PoA-hat", "95 %", *roles, "miss", "congestion", "capacity", "frozen")
    for title in (*titles, "TTFT P50", "TTFT P99", "n"):
        table.add_column(title, justify="right")
    for period in report.periods:
        poa, shares, ttft = period.poa, period.poa.shares, period.ttft
        table.add_row(
            f"{period.from_s:.0f}",
            number(poa.poa_hat),
            _interval(poa, 3),
            *(number(poa.by_role.get(role)) for role in roles),
            *((percent(share) for share in msgspec.structs.astuple(shares)) if shares else [UNKNOWN] * 3),
            number(period.frozen.poa_hat),
            seconds(ttft.p50_s),
            seconds(ttft.p99_s),
            str(ttft.samples),
        )
    return table


def _workers(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker")
    table.add_column("role")
    for title in ("weight", "prefill", "per token", "iteration", "per request", "per KV token"):
        table.add_column(title, justify="right")
    for title in ("error", "times its pool's"):
        table.add_column(title, justify="right")
    for worker in report.workers:
        curve = worker.curve
        table.add_row(
            f"{worker.worker_id}/{worker.dp_rank}",
            worker.role,
            number(worker.samples, 0),
            seconds(worker.prefill_s),
            _microseconds(curve.prefill_token_s, worker.prefill_s),
            seconds(worker.iteration_s),
            _microseconds(curve.decode_request_s, worker.iteration_s),
            _microseconds(curve.decode_kv_token_s, worker.iteration_s),
            percent(worker.residual_frac),
            number(worker.factor, 2) + " straggler" * worker.straggler,
        )
    return table


def _microseconds(value_s: float, of_s: float | None) -> str:
    """Return a small duration, unknown where what it is part of is."""
    return UNKNOWN if of_s is None else f"{value_s * 1e6:.2f} µs"


def _interval(estimate: Estimate, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return UNKNOWN
    return f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
