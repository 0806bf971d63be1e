"""How the three games of one record are shown to a person.

Owns: the rows of `watch` and `status` that tell of caching, the split of workers and where the cost is from;
      the same in words, for `explain` of a running graph.
Does not own: the record (telemetry.py, coupling.py), the other rows (view.py).
Invariant: what is unknown is shown as unknown, with its reason.
"""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from dynamo_poa.coupling import AllocationEstimate, Attainment, CacheSwap, CachingEstimate, gained, in_words
from dynamo_poa.serve.show import number, percent
from dynamo_poa.telemetry import TelemetryRecord


def games_rows(record: TelemetryRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row."""
    coupling = record.coupling
    if coupling.dominant:
        yield "dominant", f"{coupling.dominant}: {coupling.remedy}"
    yield "caching", caching_text(record.caching)
    if record.cache_swap is not None:
        yield "after swap", _swap(record.cache_swap)
    yield "split", allocation_text(record.allocation)
    if record.poa_advice is not None:
        yield "advice", f"{record.poa_advice} (for {record.poa_advice.held_s:.0f} s)"


def in_words_view(record: TelemetryRecord) -> RenderableType:
    """Return where the cost is from, in words, and the games it is known from."""
    poa = number(record.poa_hat) if record.poa_hat is not None else f"none: {record.poa_reason}"
    lines = [
        f"{record.regime}: {record.reason}",
        in_words(record.coupling),
        "",
        f"routing    PoA-hat {poa}",
        f"caching    {caching_text(record.caching)}",
        f"split      {allocation_text(record.allocation)}",
    ]
    if record.cache_swap is not None:
        lines.append(f"after swap {_swap(record.cache_swap)}")
    return Group(*map(Text, lines))


def caching_text(found: CachingEstimate) -> str:
    """Return the caching game, or why it is not known."""
    copies = [
        f"{number(found.duplication)} copies a block" * (found.duplication is not None),
        f"{percent(found.copies_frac)} of capacity copies" * (found.copies_frac is not None),
        f"{percent(found.reload_frac)} of evictions too early" * (found.reload_frac is not None),
        "events missed: approximate" * found.uncertain,
    ]
    told = "".join(f"; {part}" for part in copies if part)
    if found.poa_hat is None:
        return f"PoA-hat none: {found.reason}{told}"
    size = f"{found.method}, {found.groups} prefix groups on {found.workers} workers"
    costs = f"{number(found.observed_s)} GPU s a second, {number(found.optimal_s)} at best"
    return f"PoA-hat {number(found.poa_hat)} ({costs}; {size}){told}"


def _swap(swap: CacheSwap) -> str:
    hits = " → ".join(
        percent(share) for share in (swap.hit_frac_before, swap.hit_frac_during, swap.hit_frac_after)
    )
    copies = f"{number(swap.duplication_before)} → {number(swap.duplication_after)}"
    omega = f"ω {swap.overlap_weight_before:g} → {swap.overlap_weight_after:g}"
    if swap.overlap_weight_before == swap.overlap_weight_after:
        omega = "who picks the worker changed"
    return f"{omega}: found cached {hits} (before, during, after), copies a block {copies}"


def allocation_text(found: AllocationEstimate) -> str:
    """Return the split of workers and the best one, or why they are not known."""
    poa = f"PoA-hat none: {found.reason}" if found.poa_hat is None else f"PoA-hat {number(found.poa_hat)}"
    if found.now is None:
        return poa
    told = f"{poa}; predicted within objectives now: {_attained(found.now)}"
    if found.target is not None:
        told += f"; better: {_attained(found.target)}"
        if found.gain_frac is not None and found.gain_low is not None and found.gain_high is not None:
            told += f", {gained(found.gain_frac, found.gain_low, found.gain_high)}"
    return told


def _attained(found: Attainment) -> str:
    within = f"TTFT {percent(found.ttft_frac)}, ITL {percent(found.itl_frac)}"
    return f"{found.split} {within}, {number(found.goodput_rps, 1)} requests/s"
