"""What a live cell amounts to: which requests count, its figures, its picks, the bench's own health.

Owns: the measured stretches of a cell; which requests belong to one; figures beyond those of the requests
      alone; when a cell is void.
Does not own: the arithmetic of latencies (figures.py), when stretches begin and end (live.py).
Invariant: pure. A cell in which the processors were the limit, or the client was late, is void and says why.
Source: `void` by the machine as in bench/story.py; by lateness: issue 5, 20 ms.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynamo_poa.bench.processes import MachineTime, busy_frac
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.bench.story import CPU_BUSY_FRAC, quantile
from dynamo_poa.bench.suites.cells import Cell, Point, Result
from dynamo_poa.bench.suites.figures import Served, figures_of
from dynamo_poa.bench.suites.live_client import Asked
from dynamo_poa.telemetry import TelemetryRecord

MAX_SEND_LAG_S = 0.02


class Reading(NamedTuple):
    """Processor time at an instant. Of the graph by process; of graphs that wait, all together."""

    at_s: float
    machine: MachineTime
    own_s: dict[str, float]
    idle_s: float
    client_s: float
    tokens: int


class Span(NamedTuple):
    """A measured stretch; `record`: the controller's last of it."""

    name: str
    first: Reading
    last: Reading
    record: TelemetryRecord | None

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.last.at_s - self.first.at_s

    @property
    def busy_frac(self) -> float:
        """Return the share of the machine's processors that was busy."""
        return busy_frac(self.first.machine, self.last.machine)


def result_of(
    cell: Cell,
    asked: Sequence[Asked],
    spans: Sequence[Span],
    computed_tokens: int,
    series: Sequence[Point] = (),
) -> Result:
    """Work out a cell's figures and health.

        cached_frac = 1 - computed_tokens / prompt tokens of those whose first token came in that time
        duplication = mean over a stretch's points: caches are as they are at an instant

    Args:     asked: all of the cell, those of the warm-up and of the drain too.
              computed_tokens: of prompts, by workers that prefill, from the first stretch to the drain's end.
              series: what the controller said while it was measured.
    Raises:   MeasurementError when a stretch has no answered request.
    """
    figures, measured = dict[str, float](), list[Asked]()
    for span in spans:
        mine = [one for one in asked if _belongs(one, span)]
        measured += mine
        prefix = f"{span.name}." if span.name else ""
        figures |= {prefix + key: value for key, value in _figures(mine, asked, span).items()}
        copies = [point.duplication for point in series if point.phase == span.name]
        if known := [copy for copy in copies if copy is not None]:
            figures[f"{prefix}duplication"] = sum(known) / len(known)
    since_s = spans[0].first.at_s
    prompt_tokens = sum(one.request.input_tokens for one in asked if _first_token_at_s(one) > since_s)
    if prompt_tokens:
        figures["cached_frac"] = max(0.0, 1 - computed_tokens / prompt_tokens)
    health = _health(measured, spans)
    reason = _why_void(health)
    return Result(
        cell=cell,
        state="void" if reason else "done",
        reason=reason,
        figures=figures,
        health=health,
        series=tuple(series),
    )


def picks_of(
    asked: Sequence[Asked], spans: Sequence[Span], chosen: Mapping[int, int] | None, names: Mapping[int, str]
) -> dict[str, int]:
    """Return requests by worker, also of workers that had none.

    Args:  chosen: our router's decisions by worker; None where Dynamo's frontend said of each request who
           served it.  names: by worker.
    """
    if chosen is None:
        measured = [one for one in asked if any(_belongs(one, span) for span in spans)]
        served = (one.result.workers for one in measured if one.result.workers is not None)
        chosen = Counter(worker for workers in served for worker in set(workers))  # an aggregated one is both
    return {name: chosen.get(worker, 0) for worker, name in sorted(names.items(), key=lambda item: item[1])}


def _figures(mine: Sequence[Asked], asked: Sequence[Asked], span: Span) -> dict[str, float]:
    try:
        figures = figures_of([_served(one) for one in mine], span.seconds)
    except MeasurementError as error:
        errors = Counter(one.result.error for one in mine if one.result.error)
        said = "; ".join(f"{count} x {what}" for what, count in errors.most_common(3))
        raise MeasurementError(f"{error}{': ' if said else ''}{said}") from error
    # Rates are of what came in this time, whenever it was due.
    ended = [one for one in asked if one.result.ok and span.first.at_s <= one.ended_at_s < span.last.at_s]
    figures["throughput_rps"] = len(ended) / span.seconds
    figures["output_tokens_per_s"] = (span.last.tokens - span.first.tokens) / span.seconds
    if record := span.record:
        poa = {
            "poa_hat": record.poa_hat,
            "poa_low": record.poa_low,
            "poa_high": record.poa_high,
            "poa_frozen": record.poa_frozen,
            "poa_caching": record.caching.poa_hat,
            "caching_observed_s": record.caching.observed_s,
            "caching_optimal_s": record.caching.optimal_s,
            "hit_frac": record.cache_hit_frac,
        }
        figures |= {key: value for key, value in poa.items() if value is not None}
    return figures


def _belongs(one: Asked, span: Span) -> bool:
    """Tell whether a request is a stretch's: by when it was due, or ended where nobody waits for a due time.

    In an open loop the slow ones would be left out if those counted that ended in time. In a closed one those
    that fail would be, for who waits in vain is given up long after: they count by when they were sent.
    """
    of_closed_s = one.ended_at_s if one.result.ok else one.sent_at_s
    at_s = one.due_at_s if one.open_loop else of_closed_s
    return span.first.at_s <= at_s < span.last.at_s


def _served(one: Asked) -> Served:
    result, late_s = one.result, (one.sent_at_s - one.due_at_s) if one.open_loop else 0.0
    ttft_s = result.ttft_s or 0.0
    decoding_s = result.latency_s - ttft_s
    return Served(
        ttft_s=ttft_s + late_s,
        itl_s=decoding_s / (result.tokens - 1) if result.tokens > 1 else None,
        e2e_s=result.latency_s + late_s,
        output_tokens=result.tokens,
        input_tokens=one.request.input_tokens,
        ok=result.ok,
    )


def _first_token_at_s(one: Asked) -> float:
    return float("-inf") if one.result.ttft_s is None else one.result.started_at_s + one.result.ttft_s


def _health(asked: Sequence[Asked], spans: Sequence[Span]) -> dict[str, float]:
    first, last = spans[0].first, spans[-1].last
    seconds = last.at_s - first.at_s
    total_s = (last.machine.total_s - first.machine.total_s) or seconds  # the kernel counts in steps of 10 ms
    own_s = {name: last.own_s[name] - first.own_s.get(name, 0.0) for name in last.own_s}
    client_s = last.client_s - first.client_s
    return {
        "busy_frac": max(span.busy_frac for span in spans),
        "own_frac": (sum(own_s.values()) + client_s) / total_s,
        "client_frac": client_s / seconds,
        "idle_graphs_frac": (last.idle_s - first.idle_s) / total_s,
        "send_lag_p99_s": quantile((max(one.sent_at_s - one.due_at_s, 0.0) for one in asked), 0.99),
        **{f"cpu.{name}": spent_s / seconds for name, spent_s in own_s.items()},
    }


def _why_void(health: Mapping[str, float]) -> str:
    reasons = []
    if health["busy_frac"] > CPU_BUSY_FRAC:
        reasons.append(f"the processors were {health['busy_frac']:.0%} busy (bound {CPU_BUSY_FRAC:.0%})")
    if health["send_lag_p99_s"] > MAX_SEND_LAG_S:
        lag_ms = health["send_lag_p99_s"] * 1e3
        reasons.append(
            f"requests were sent {lag_ms:.0f} ms late at P99 (bound {MAX_SEND_LAG_S * 1e3:.0f} ms)"
        )
    return "; ".join(reasons)
