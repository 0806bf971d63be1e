"""How a person reads whether the workers are split well, and which split would be better.

Owns: the verdict in words, the table of splits.
Does not own: the figures (split.py, advise.py), when a change is advised (advice.py).
Invariant: leaving the split is told with figures, as changing it is; what is unknown is told with its reason.
"""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_poa.advice import MIN_GAIN_FRAC, worth_it
from dynamo_poa.coupling import Advice, AllocationEstimate, Attainment
from dynamo_poa.serve.advise import Advised
from dynamo_poa.serve.show import UNKNOWN, figures_table, number, percent
from dynamo_poa.split import serves


def verdict(allocation: AllocationEstimate, advice: Advice | None) -> str:
    """Return what to do, in a line: change the split, leave it, or that it is not known."""
    if advice is not None:
        return str(advice)
    now, target = allocation.now, allocation.target
    if now is None:
        return f"no advice: {allocation.reason}"
    if allocation.best is not None and not serves(allocation.best):
        return f"leave the split {now.split}: none gets requests done within both objectives"
    if target is None:
        return f"leave the split {now.split}: no other gets more done within both objectives"
    low, high = allocation.gain_low, allocation.gain_high
    interval = "" if low is None or high is None else f" ({low:+.1%} to {high:+.1%})"
    gain = f"{target.split} would gain {_signed(allocation.gain_frac)}{interval}"
    if worth_it(allocation) is not None:
        return f"leave the split {now.split} for now: {gain}, but has not held for a minute"
    small = allocation.gain_frac is not None and allocation.gain_frac < MIN_GAIN_FRAC
    why = "too little to move workers for" if small else "within noise"
    return f"leave the split {now.split}: {gain}, {why}"


def allocation_view(allocation: AllocationEstimate, advice: Advice | None) -> RenderableType:
    """Return the verdict and what it rests on."""
    return Group(*_parts(allocation, advice))


def advised_view(found: Advised) -> RenderableType:
    """Return what a recording or a trace says, as a person reads it."""
    asked = found.asked
    tokens = "".join(
        f", {number(value, 0)} {name} tokens"
        for name, value in (
            ("prompt", asked.prompt_tokens),
            ("uncached", asked.uncached_tokens),
            ("output", asked.output_tokens),
        )
        if value is not None
    )
    return Group(
        Text(f"asked      {number(asked.rps, 2)} requests/s over {asked.seconds} s{tokens}"),
        Text(f"objectives TTFT {found.slo.ttft_s:g} s, ITL {found.slo.itl_s:g} s"),
        *_parts(found.allocation, found.advice),
        *(Text(f"note       {note}") for note in found.notes),
    )


def _parts(allocation: AllocationEstimate, advice: Advice | None) -> Iterator[RenderableType]:
    yield Text(verdict(allocation, advice), style="bold")
    if allocation.now is None:
        return
    yield Text()
    yield _splits(allocation)
    yield Text()
    priced = f"{number(allocation.poa_hat)}, of the present split"
    yield Text(f"PoA-hat    {priced if allocation.poa_hat is not None else f'none: {allocation.reason}'}")
    more = ((allocation.one_more_prefill, "prefill"), (allocation.one_more_decode, "decode"))
    said = [f"{_signed(gain)} with one more {pool} worker" for gain, pool in more]
    yield Text(f"goodput    {', '.join(said)}")


def _signed(frac: float | None) -> str:
    return UNKNOWN if frac is None else f"{frac:+.1%}"


def _splits(allocation: AllocationEstimate) -> Table:
    """Return the splits that have a name, each once."""
    names: dict[Attainment, list[str]] = {}
    for attained, name in (
        (allocation.now, "present"),
        (allocation.target, "advised" if worth_it(allocation) is not None else "nearest as good as the best"),
        (allocation.best, "best"),
        (allocation.equilibrium, "equilibrium"),
    ):
        if attained is not None:
            names.setdefault(attained, []).append(name)
    table = figures_table("split", "TTFT attained", "ITL attained", "goodput", "")
    for attained, called in names.items():
        table.add_row(
            str(attained.split),
            percent(attained.ttft_frac),
            percent(attained.itl_frac),
            f"{attained.goodput_rps:.2f}/s",
            ", ".join(called),
        )
    return table
