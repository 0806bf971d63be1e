"""How the three games of one record are shown to a person.

Owns: the rows of `watch` and `status` that tell of caching, the split of workers and where the cost is from.
Does not own: the record (telemetry.py, coupling.py), the other rows (view.py).
Invariant: what is unknown is shown as unknown, with its reason.
"""

from collections.abc import Iterator

from dynamo_poa.coupling import AllocationEstimate, Attainment, CacheSwap, CachingEstimate
from dynamo_poa.serve.show import number, percent
from dynamo_poa.telemetry import TelemetryRecord


def games_rows(record: TelemetryRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row."""
    coupling = record.coupling
    if coupling.dominant:
        yield "dominant", f"{coupling.dominant}: {coupling.remedy}"
    yield "caching", _caching(record.caching)
    if record.cache_swap is not None:
        yield "after swap", _swap(record.cache_swap)
    yield "split", _allocation(record.allocation)
    if record.poa_advice is not None:
        yield "advice", f"{record.poa_advice} (for {record.poa_advice.held_s:.0f} s)"


def _caching(found: CachingEstimate) -> str:
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
    return f"PoA-hat {number(found.poa_hat)} ({size}){told}"


def _swap(swap: CacheSwap) -> str:
    hits = " → ".join(
        percent(share) for share in (swap.hit_frac_before, swap.hit_frac_during, swap.hit_frac_after)
    )
    copies = f"{number(swap.duplication_before)} → {number(swap.duplication_after)}"
    omega = f"ω {swap.overlap_weight_before:g} → {swap.overlap_weight_after:g}"
    return f"{omega}: found cached {hits} (before, during, after), copies a block {copies}"


def _allocation(found: AllocationEstimate) -> str:
    if found.poa_hat is None or found.now is None or found.best is None:
        return f"PoA-hat none: {found.reason}"
    told = f"PoA-hat {number(found.poa_hat)}, now {_attained(found.now)}"
    if found.best.split != found.now.split:
        told += f"; best {_attained(found.best)}"
    return told


def _attained(found: Attainment) -> str:
    within = f"TTFT {percent(found.ttft_frac)}, ITL {percent(found.itl_frac)}"
    return f"{found.split} ({within} within objective, {number(found.goodput_rps, 1)} good requests/s)"
