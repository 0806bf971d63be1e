"""How one record of the controller is shown to a person, and which difference between two is worth a line.

Owns: the tables of `status` and `watch`.
Does not own: the record (telemetry.py), how a figure is written (show.py).
Invariant: what is unknown is shown as unknown, with its reason where there is one.
"""

from collections.abc import Iterator
from datetime import datetime

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_poa.regime_state import UPSTREAM
from dynamo_poa.resources import show
from dynamo_poa.serve.games_view import games_rows
from dynamo_poa.serve.show import UNKNOWN, count, counts, figures_table, number, percent, seconds
from dynamo_poa.telemetry import PolicyView, TelemetryRecord
from dynamo_poa.values import PoolRegime, Regime, Setting, WorkerLatency

_COLOURS = {Regime.BELOW: "green", Regime.TRANSITION: "yellow", Regime.SATURATED: "red"}


def changes(before: TelemetryRecord | None, now: TelemetryRecord) -> Iterator[str]:
    """Yield a line for each change between two records, nothing for the first."""
    if before is None:
        return
    at = _time(now.at_s)
    if before.mode is not now.mode:
        yield f"{at}  mode {before.mode} -> {now.mode}"
    if before.regime is not now.regime:
        yield f"{at}  {before.regime} -> {now.regime}: {now.reason}"
    for role in ("policy", "shadow"):
        was, policy = getattr(before, role), getattr(now, role)
        if was is not None and policy is not None and was.reason != policy.reason:
            yield f"{at}  {role} {policy.name}: {was.reason} -> {_why(policy)}"
    if _values(before) != _values(now) or before.kind is not now.kind:
        yield f"{at}  {_values(before)} {before.kind} -> {_values(now)} {now.kind}, revision {now.revision}"


def record_view(record: TelemetryRecord) -> RenderableType:
    """Return one record as a person reads it."""
    return Group(
        _summary(record), Text(), _pools(record), Text(), _routers(record), Text(), _counters(record)
    )


def _summary(record: TelemetryRecord) -> Table:
    table = _grid()
    table.add_row(
        "graph", f"{record.namespace}, mode {record.mode}, tick {record.tick} at {_time(record.at_s)}"
    )
    dwell = f" (next change in {record.dwell_left_s:.1f} s at the earliest)" if record.dwell_left_s else ""
    regime = Text(str(record.regime), style=f"bold {_COLOURS[record.regime]}")
    driven = f" by {record.driver}" if record.driver else ""
    table.add_row("regime", regime.append(f"{driven}  {record.reason}{dwell}", style="not bold default"))
    if record.bottleneck == UPSTREAM:
        table.add_row("bottleneck", Text("upstream of the workers, which are idle", style="yellow"))
    table.add_row("PoA-hat", _poa(record))
    if record.poa_shares is not None:
        shares = msgspec.structs.asdict(record.poa_shares)
        table.add_row("excess", ", ".join(f"{kind} {percent(share)}" for kind, share in shares.items()))
    for name, text in games_rows(record):
        table.add_row(name, text)
    if record.stragglers:
        table.add_row("stragglers", ", ".join(map(_straggler, record.stragglers)))
    table.add_row(
        "TTFT",
        f"P50 {seconds(record.ttft_p50_s)}, P99 {seconds(record.ttft_p99_s)}, its average "
        f"{seconds(record.ttft_average_s)} ({record.ttft_samples} samples, {record.ttft_source})",
    )
    theta1, theta2 = seconds(record.theta1_s), seconds(record.theta2_s)
    table.add_row("against", f"baseline {seconds(record.baseline_s)}, θ1 {theta1}, θ2 {theta2}")
    table.add_row("parameters", parameters(record))
    for name, policy in (("policy", record.policy), ("shadow", record.shadow)):
        if policy is not None:
            table.add_row(name, _policy(policy))
    table.add_row(
        "load",
        f"{count(record.in_flight)} in flight, {number(record.arrival_rate, 1)} arrivals/s, "
        f"{percent(record.shed_frac)} refused",
    )
    return table


def _poa(record: TelemetryRecord) -> str:
    frozen = "" if record.poa_frozen is None else f"; the paper's: {number(record.poa_frozen)}"
    if record.poa_hat is None:
        return f"none: {record.poa_reason}{frozen}"
    legs = ", ".join(f"{role} {value:.3f}" for role, value in record.poa_by_role.items())
    lacks = f"; {record.poa_reason}" if record.poa_reason else ""
    interval = f"{number(record.poa_low)} to {number(record.poa_high)}"
    return f"{record.poa_hat:.3f} ({interval}) from {record.poa_samples} snapshots ({legs}{lacks}){frozen}"


def _straggler(latency: WorkerLatency) -> str:
    rank = f" rank {latency.key.dp_rank}" if latency.key.dp_rank else ""
    return f"{latency.role} {latency.key.worker_id}{rank} {number(latency.factor, 1)}x slower than its pool"


def parameters(record: TelemetryRecord) -> str:
    """Return the parameters in force, whose they are, and what became of the policy's wish."""
    pin = "" if record.pin_left_s is None else f" for another {record.pin_left_s:.0f} s"
    shown = f"{_values(record)}, revision {record.revision}, {record.kind}{pin}, {record.applied}"
    wanted = Setting(
        record.wanted_router_temperature,
        record.wanted_overlap_weight,
        record.wanted_prefill_load_scale,
        record.wanted_selection,
    )
    if wanted != _values(record):
        shown += f"; the policy would set {wanted}"
    return shown


def _policy(policy: PolicyView) -> Text:
    """Return what a policy wants, why, what that is predicted to save, and whether it failed."""
    gain = policy.predicted_gain_frac
    predicted = "" if gain is None else f", predicted to save {percent(gain)}"
    shown = Text(f"{policy.name}: {policy.setting}, {_why(policy)}{predicted}")
    if policy.disabled_left_s is not None:
        shown.append(f", asked again in {policy.disabled_left_s:.0f} s", style="red")
    if policy.errors:
        shown.append(f", failed {policy.errors} times", style="red")
    return shown


def _why(policy: PolicyView) -> str:
    return f"{policy.reason} ({policy.detail})" if policy.detail else policy.reason


def _pools(record: TelemetryRecord) -> RenderableType:
    if not record.pools:
        return Text("no worker known")
    table = figures_table(
        "pool", "regime", "workers", "silent", "KV used", "fullest", "queued", "running", "busy"
    )
    for role, pool in record.pools.items():
        table.add_row(
            role,
            _pool_regime(record.pool_regimes.get(role)),
            count(pool.workers),
            count(pool.stale_workers),
            percent(pool.kv_used_frac),
            percent(pool.kv_used_frac_max),
            count(pool.queued_requests),
            count(pool.running_requests),
            percent(pool.busy_frac),
        )
    hot = [
        f"{worker.worker_id} rank {worker.dp_rank} ({role}): {worker.resource} "
        f"{show(worker.resource, worker.value)}, over {show(worker.resource, worker.threshold)}"
        for role, pool in record.pool_regimes.items()
        for worker in pool.hot
    ]
    return Group(table, *(Text(f"hot worker {line}", style="yellow") for line in hot))


def _pool_regime(pool: PoolRegime | None) -> Text:
    """Return a pool's regime and the resource that drives it."""
    if pool is None:
        return Text(UNKNOWN)
    shown = Text(str(pool.regime), style=_COLOURS[pool.regime])
    if not pool.resource:
        return shown if pool.known else shown.append(", not all known", style="dim")
    value = "" if pool.value is None else f" {show(pool.resource, pool.value)}"
    return shown.append(f" {pool.resource}{value}", style="default")


def _routers(record: TelemetryRecord) -> RenderableType:
    if not record.routers:
        return Text("no router heard")
    table = figures_table("router", "revision", "from", "in flight", "dropped", "heard ago")
    for router in record.routers:
        table.add_row(
            router.router_id,
            count(router.revision),
            router.source,
            counts(router.in_flight),
            count(router.dropped),
            seconds(router.age_s),
        )
    return table


def _counters(record: TelemetryRecord) -> Table:
    table = _grid()
    rate, age = number(record.message_rate, 0), seconds(record.message_age_s)
    table.add_row("messages", f"{counts(record.messages_received)}; {rate}/s, the last {age} ago")
    table.add_row("dropped", counts(record.messages_dropped))
    table.add_row("legs ended", counts(record.requests_ended))
    table.add_row(
        "controller",
        f"{record.regime_changes} regime changes, {record.swaps} swaps, tick {record.tick_s * 1000:.1f} ms, "
        f"{record.failed_ticks} failed, NATS {'connected' if record.bus_connected else 'away'}",
    )
    return table


def _values(record: TelemetryRecord) -> Setting:
    return Setting(
        record.router_temperature, record.overlap_weight, record.prefill_load_scale, record.selection
    )


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S")


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    return table
