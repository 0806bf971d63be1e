"""What a level of the sweep has shown, and how a person reads it.

Owns: the records `--json` writes, what of the controller's telemetry is in them, when a level is void, the
      tables.
Does not own: the load and the graph (sweep.py), any estimate: the controller's own are shown.
Invariant: a level in which the processors were the limit says so; what is unknown is `-`, never 0.
"""

from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from dynamo_poa.bench.report import Machine
from dynamo_poa.bench.story import CPU_BUSY_FRAC
from dynamo_poa.serve.show import number, seconds
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Estimate, Regime, Shares


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker the controller calls a straggler; its id is text because JSON rounds it."""

    worker_id: str
    role: str
    factor: float | None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One concurrency on one fleet: the controller's last record of it, and what its clients saw.

    cpu_busy_frac:  of the whole machine, whatever ran on it
    cpu_own_frac:   of it, what the graph and its load took
    void:           the processors were what limited, so that the figures say nothing of the workers
    """

    fleet: str
    concurrency: int
    warm_up_s: float
    seconds: float
    requests: int
    failed: int
    throughput_rps: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    estimate: Estimate
    regime: Regime
    stragglers: tuple[Slow, ...]
    cpu_busy_frac: float
    cpu_own_frac: float
    void: bool


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes; `failed` names the fleets that could not be measured, and why."""

    machine: Machine
    conditions: tuple[str, ...]
    levels: tuple[Level, ...]
    void: bool
    failed: dict[str, str]
    seconds: float


def is_void(cpu_busy_frac: float) -> bool:
    """Tell whether the processors were what limited."""
    return cpu_busy_frac > CPU_BUSY_FRAC


def estimate_of(record: TelemetryRecord) -> Estimate:
    """Return the record's PoA-hat as the estimate it was."""
    return Estimate(
        poa_hat=record.poa_hat,
        low=record.poa_low,
        high=record.poa_high,
        samples=record.poa_samples,
        shares=record.poa_shares,
        reason=record.poa_reason,
        method=record.poa_method,
        legs=record.poa_legs,
    )


def stragglers_of(record: TelemetryRecord) -> tuple[Slow, ...]:
    """Return the workers that the record names as stragglers, the slowest first."""
    slow = sorted(record.stragglers, key=lambda worker: -(worker.factor or 0.0))
    return tuple(
        Slow(worker_id=str(worker.key.worker_id), role=worker.role, factor=worker.factor) for worker in slow
    )


def line(level: Level) -> str:
    """Return a level in a line, told as it ends."""
    parts = [
        f"PoA-hat {number(level.estimate.poa_hat)}"
        + f" ({level.estimate.reason})" * bool(level.estimate.reason),
        f"{level.throughput_rps:.1f} requests/s",
        f"TTFT P50 {seconds(level.ttft_p50_s)}",
        level.regime,
        *(f"straggler {slow.worker_id} {number(slow.factor, 1)}x" for slow in level.stragglers),
        f"CPU {_cpu(level)}",
    ]
    return ", ".join(parts) + f", {level.failed} failed" * bool(level.failed)


def tables(levels: Sequence[Level]) -> Iterator[Table]:
    """Yield the closing tables: the levels, then their estimates by leg."""
    yield _overall(levels)
    for role in dict.fromkeys(role for level in levels for role in level.estimate.legs):
        yield _of_leg(role, levels)


def _overall(levels: Sequence[Level]) -> Table:
    table = Table(
        title="PoA-hat against concurrency: 2 prefill and 4 decode workers",
        caption="miss, congestion, capacity: shares of the cost beyond an unloaded system; "
        "TTFT as the clients saw it; CPU of the whole machine (of it the graph and its load)",
    )
    _columns(table, "fleet", "users", *_ESTIMATE)
    _columns(table, "requests/s", "TTFT P50", "P99", "regime", "stragglers", "CPU")
    for level in levels:
        table.add_row(
            level.fleet,
            str(level.concurrency),
            *_cells(level.estimate),
            f"{level.throughput_rps:.1f}",
            seconds(level.ttft_p50_s),
            seconds(level.ttft_p99_s),
            level.regime,
            ", ".join(
                f"{slow.worker_id} ({slow.role}) {number(slow.factor, 1)}x" for slow in level.stragglers
            ),
            _cpu(level),
            end_section=_is_last(level, levels),
        )
    return table


def _of_leg(role: str, levels: Sequence[Level]) -> Table:
    table = Table(title=f"{role} leg")
    _columns(table, "fleet", "users", *_ESTIMATE, "lacks")
    for level in levels:
        leg = level.estimate.legs.get(role, Estimate())
        cells = (level.fleet, str(level.concurrency), *_cells(leg), leg.reason)
        table.add_row(*cells, end_section=_is_last(level, levels))
    return table


_ESTIMATE = ("PoA-hat", "95 %", "miss", "congestion", "capacity")
_WORDS = ("fleet", "regime", "stragglers", "lacks")


def _columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="left" if name in _WORDS else "right")


def _cells(estimate: Estimate) -> list[str]:
    interval = "-" if estimate.low is None else f"{number(estimate.low)} to {number(estimate.high)}"
    return [number(estimate.poa_hat), interval, *_share_cells(estimate.shares)]


def _share_cells(shares: Shares | None) -> list[str]:
    if shares is None:
        return ["-"] * 3
    return [f"{share:.0%}" for share in (shares.miss, shares.congestion, shares.capacity)]


def _cpu(level: Level) -> str:
    return f"{level.cpu_busy_frac:.0%} ({level.cpu_own_frac:.0%})" + " VOID" * level.void


def _is_last(level: Level, levels: Sequence[Level]) -> bool:
    """Tell whether a level is its fleet's last."""
    return level is [other for other in levels if other.fleet == level.fleet][-1]
