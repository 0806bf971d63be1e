"""What `estimate` says of a recording, and how a person reads it.

Owns: the report's fields, which are its JSON, and its tables.
Does not own: the figures (replay.py).
Invariant: what is inexact or was not understood is shown beside the figures it concerns.
"""

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_poa.recording import Header
from dynamo_poa.serve.show import counts, number, seconds
from dynamo_poa.values import Estimate, TtftSample


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one stretch of time.

    from_s, to_s:  since the first message
    poa_samples:   decisions behind each leg
    ttft:          of requests that got their first token in the period
    """

    from_s: float
    to_s: float
    poa: Estimate
    poa_samples: dict[str, int]
    ttft: TtftSample


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `estimate` says.

    overall:   the whole recording; PoA-hat as the mean over consecutive windows
    periods:   those that decisions came in; PoA-hat of the last `window` decisions of each leg at the end
    legs:      ended legs by role and outcome
    messages:  by topic; `unknown` are subjects of neither Dynamo nor us
    skipped:   lines of the file that are no message, by reason
    notes:     what makes the figures less than exact, by what it is; empty when nothing does
    """

    header: Header | None
    window: int
    block_size: int
    overall: Period
    periods: tuple[Period, ...]
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
        yield _table(report)
    poa, ttft = report.overall.poa, report.overall.ttft
    if poa.poa_hat is None:
        yield Text(f"PoA-hat    none: {poa.reason}")
    else:
        legs = [f"{role} {value:.4f}" for role, value in poa.by_role.items()] + [poa.reason] * bool(
            poa.reason
        )
        how = f"{poa.method}, window {report.window}, block size {report.block_size}"
        yield Text(f"PoA-hat    {poa.poa_hat:.4f} of {poa.samples} decisions ({', '.join(legs)}); {how}")
    yield Text(f"TTFT       P50 {seconds(ttft.p50_s)}, P99 {seconds(ttft.p99_s)} of {ttft.samples} requests")
    for role, outcomes in report.legs.items():
        yield Text(f"{role:<10} {counts(outcomes)}")
    for name, found in (("skipped", report.skipped), ("unknown", report.unknown), ("inexact", report.notes)):
        if found:
            yield Text(f"{name:<10} {counts(found)}")


def _table(report: Report) -> Table:
    roles = list(dict.fromkeys(role for period in report.periods for role in period.poa_samples))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("from s", "PoA-hat", *(f"{role} (n)" for role in roles), "TTFT P50", "TTFT P99", "n"):
        table.add_column(title, justify="right")
    for period in report.periods:
        legs = [
            f"{number(period.poa.by_role.get(role), 4)} ({period.poa_samples.get(role, 0)})" for role in roles
        ]
        table.add_row(
            f"{period.from_s:.0f}",
            number(period.poa.poa_hat, 4),
            *legs,
            seconds(period.ttft.p50_s),
            seconds(period.ttft.p99_s),
            str(period.ttft.samples),
        )
    return table
