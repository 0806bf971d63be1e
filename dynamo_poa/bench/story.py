"""Turns what a live run shows - results, telemetry, decisions - into phases, swaps and a verdict.

Owns: per-phase figures, swap latency, what is worth a line while it happens.
Does not own: running anything (demo.py), drawing (demo.py), what becomes of a slow worker (relief.py).
Invariant: pure; a figure that was not observed is None, never a default.
"""

import statistics
from collections.abc import Iterable

import msgspec

from dynamo_poa.bench.load import Result
from dynamo_poa.bench.relief import ReliefWatch, SlowWorker
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.ttft import exact_quantile
from dynamo_poa.values import Regime, Selection
from dynamo_poa.wire import Chosen, DecisionBatch, Heartbeat

CPU_BUSY_FRAC = 0.85  # above this the machine, not the simulated GPU, may be what limits


class PhaseReport(msgspec.Struct, kw_only=True):
    """One phase of the load. Regime, τ, ω and who selects are those at its end; PoA-hat is the median.

    slow_share: of the decode picks, that the slow worker had; None where the controller names none
    """

    name: str
    concurrency: int
    requests: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    e2e_p99_s: float | None = None
    throughput_rps: float | None = None
    poa_hat: float | None = None
    regime: Regime | None = None
    router_temperature: float | None = None
    overlap_weight: float | None = None
    selection: Selection | None = None
    slow_share: float | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A regime change as telemetry showed it."""

    at_s: float
    before: Regime
    after: Regime
    reason: str


class SwapLatency(msgspec.Struct, frozen=True, kw_only=True):
    """From the controller's decision to the first request routed with it, over all swaps."""

    median: float | None
    max: float | None


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `demo --json` writes."""

    phases: list[PhaseReport]
    swaps: int
    swap_latency_s: SwapLatency
    transitions: list[Change]
    slow_worker: SlowWorker | None
    failed_requests: int
    failures: dict[str, int]
    bottleneck: str
    cpu_busy_frac: float
    seconds: float

    @property
    def went_up_and_down(self) -> bool:
        """Tell whether the regime rose and fell at least once."""
        steps = [change.after.level - change.before.level for change in self.transitions]
        return any(step > 0 for step in steps) and any(step < 0 for step in steps)

    @property
    def relieved(self) -> bool:
        """Tell whether a slow worker was found and relieved."""
        return self.slow_worker is not None and self.slow_worker.relieved


class SwapWatch:
    """When each parameter revision was decided, and when it was first routed with."""

    def __init__(self) -> None:
        self._issued_at_s: dict[int, float] = {}
        self._first_at_s: dict[int, float] = {}

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take the controller's record of the moment."""
        self._issued_at_s.setdefault(heartbeat.params.revision, heartbeat.params.issued_at_s)

    def on_batch(self, batch: DecisionBatch) -> None:
        """Take a router's decisions."""
        for event in batch.events:
            if isinstance(event, Chosen):
                seen = self._first_at_s.get(event.revision)
                if seen is None or event.at_s < seen:
                    self._first_at_s[event.revision] = event.at_s

    def latencies_s(self) -> list[float]:
        """Return decision to first request, per revision that was both decided and used, oldest first.

        The first revision is left out: before it nobody routes.
        """
        revisions = sorted(set(self._issued_at_s) & set(self._first_at_s))
        return [self._first_at_s[r] - self._issued_at_s[r] for r in revisions if r > min(self._issued_at_s)]


class Story:
    """Collects a run phase by phase."""

    def __init__(self) -> None:
        self.phases: list[PhaseReport] = []
        self.transitions: list[Change] = []
        self.swap_watch, self.relief = SwapWatch(), ReliefWatch()
        self.failures: dict[str, int] = {}
        self.latest: TelemetryRecord | None = None
        self._ttfts_s: list[float] = []
        self._latencies_s: list[float] = []
        self._poa: list[float] = []
        self._swaps_at_start: int | None = None
        self._phase_started_at_s = 0.0

    def begin(self, name: str, concurrency: int, at_s: float) -> None:
        """Start a phase; what comes from now on belongs to it."""
        self.phases.append(PhaseReport(name=name, concurrency=concurrency))
        self._ttfts_s, self._latencies_s, self._poa = [], [], []
        self.relief.begin()
        self._phase_started_at_s = at_s

    def end(self, at_s: float) -> PhaseReport:
        """Close the phase and work out its figures."""
        phase = self.phases[-1]
        if self._ttfts_s:
            phase.ttft_p50_s = quantile(self._ttfts_s, 0.5)
            phase.ttft_p99_s = quantile(self._ttfts_s, 0.99)
            phase.e2e_p99_s = quantile(self._latencies_s, 0.99)
        if at_s > self._phase_started_at_s:
            phase.throughput_rps = (phase.requests - phase.failed) / (at_s - self._phase_started_at_s)
        phase.poa_hat = statistics.median(self._poa) if self._poa else None
        if self.latest is not None:
            phase.regime = self.latest.regime
            phase.router_temperature = self.latest.router_temperature
            phase.overlap_weight = self.latest.overlap_weight
            phase.selection = self.latest.selection
        return phase

    def on_result(self, result: Result) -> None:
        """Take one client's result."""
        phase = self.phases[-1]
        phase.requests += 1
        if not result.ok:
            phase.failed += 1
            self.failures[result.error] = self.failures.get(result.error, 0) + 1
        elif result.ttft_s is not None:
            self._ttfts_s.append(result.ttft_s)
            self._latencies_s.append(result.latency_s)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take the controller's record of the moment."""
        self.swap_watch.on_heartbeat(heartbeat)

    def on_batch(self, batch: DecisionBatch) -> None:
        """Take a router's decisions."""
        self.swap_watch.on_batch(batch)
        self.relief.on_batch(batch)

    def on_telemetry(self, record: TelemetryRecord) -> list[str]:
        """Take one tick; return what a watcher should be told."""
        lines = []
        before = self.latest
        if before is not None and record.regime is not before.regime:
            change = Change(at_s=record.at_s, before=before.regime, after=record.regime, reason=record.reason)
            self.transitions.append(change)
            lines.append(f"regime  {change.before} → {change.after}   {change.reason}")
        if before is not None and (swap := _swap(before, record)):
            lines.append(f"swap    {swap}   (revision {record.revision})")
        if self._swaps_at_start is None:
            self._swaps_at_start = record.swaps
        if record.poa_hat is not None:
            self._poa.append(record.poa_hat)
        self.latest = record
        return lines + self.relief.on_telemetry(record)

    def report(self, *, cpu_busy_frac: float, seconds: float) -> DemoReport:
        """Close the story."""
        latencies_s = self.swap_watch.latencies_s()
        for number, phase in enumerate(self.phases):
            phase.slow_share = self.relief.share(number)
        return DemoReport(
            phases=self.phases,
            swaps=0 if self.latest is None else self.latest.swaps - (self._swaps_at_start or 0),
            swap_latency_s=SwapLatency(
                median=statistics.median(latencies_s) if latencies_s else None,
                max=max(latencies_s, default=None),
            ),
            transitions=self.transitions,
            slow_worker=self.relief.slow_worker(phase.selection for phase in self.phases),
            failed_requests=sum(phase.failed for phase in self.phases),
            failures=self.failures,
            bottleneck="cpu" if cpu_busy_frac > CPU_BUSY_FRAC else "simulated-gpu",
            cpu_busy_frac=cpu_busy_frac,
            seconds=seconds,
        )


def _swap(before: TelemetryRecord, now: TelemetryRecord) -> str:
    """Return in words what of the setting has changed; nothing where it has not."""
    parts = []
    if before.selection is not now.selection:
        parts.append(f"selection {before.selection} → {now.selection}")
    if (before.router_temperature, before.overlap_weight) != (now.router_temperature, now.overlap_weight):
        parts.append(f"τ {before.router_temperature:g} → {now.router_temperature:g}")
        parts.append(f"ω {before.overlap_weight:g} → {now.overlap_weight:g}")
    if before.prefill_load_scale != now.prefill_load_scale:
        scales = (before.prefill_load_scale, now.prefill_load_scale)
        parts.append("prefill load scale " + " → ".join("own" if s is None else f"{s:g}" for s in scales))
    return ", ".join(parts)


def quantile(values: Iterable[float], q: float) -> float:
    """Return the quantile as the controller takes it, so that both mean the same by a P99."""
    return exact_quantile(sorted(values), q)
