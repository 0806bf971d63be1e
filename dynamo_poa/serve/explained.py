"""How a person reads who should have gone where.

Owns: the tables of `explain`, what of long ones is left out.
Does not own: the figures (explain.py).
Invariant: what is left out of a table is summed up under it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_poa.coupling import in_words
from dynamo_poa.serve.explain import Assigned, Explained, Explanation, Place
from dynamo_poa.serve.games_view import allocation_text, caching_text
from dynamo_poa.serve.report import shares_text
from dynamo_poa.serve.show import count, counts, figures_table, seconds

MAX_ROWS = 40
SHOWN_ID = 12  # characters of a request's id


def explanation_view(explanation: Explanation) -> RenderableType:
    """Return the explanation as a person reads it."""
    return Group(*_parts(explanation))


def _parts(found: Explanation) -> Iterator[RenderableType]:
    yield Text(f"snapshot   {found.at_s:.1f} s after the first message ({found.asked_s:g} s asked for)")
    if found.games:
        yield Text(f"latency    {_totals(found)}")
        yield Text(f"excess     {shares_text(found.shares)}")
    elif not found.lacking:
        yield Text("no requests in flight")
    for role, lack in found.lacking.items():
        yield Text(f"{role:<10} not priced: {lack}")
    for game in found.games:
        yield Text()
        phase = "" if game.phase == game.role else f", {game.phase}"
        yield Text(f"{game.role}{phase}: {_requests(len(game.rows))}, {_totals(game)}", style="bold")
        if game.stands_for > 1:
            yield Text(f"a sample: each request stands for {game.stands_for:.1f}")
        yield _workers(game.rows)
        yield from _requests_table(game)
    yield Text()
    yield Text(in_words(found.coupling))
    yield Text(f"caching    {caching_text(found.caching)}")
    yield Text(f"split      {allocation_text(found.allocation)}")
    if found.notes:
        yield Text()
        yield Text(f"inexact    {counts(found.notes)}")


def _totals(found: Explanation | Explained) -> str:
    saved_s = found.observed_s - found.optimal_s
    return (
        f"{seconds(found.observed_s)} as it was, {seconds(found.optimal_s)} at best: {_saving(saved_s)} saved"
    )


def _workers(rows: Sequence[Assigned]) -> Table:
    """Return how many requests each worker has and would have."""
    table = figures_table("worker", "requests", "at best")
    here, there = Counter(_name(row.here) for row in rows), Counter(_name(row.there) for row in rows)
    for name in sorted({*here, *there}):
        table.add_row(name, str(here[name]), str(there[name]))
    return table


def _requests_table(game: Explained) -> Iterator[RenderableType]:
    moved = [row for row in game.rows if row.moved]
    stay = [row for row in game.rows if not row.moved]
    if moved:
        yield Text()
        table = figures_table(
            "request", "tokens", "uncached", "there", "is on", "better on", "latency", "there", "saves"
        )
        for row in moved[:MAX_ROWS]:
            table.add_row(
                _shortened(row.request_id),
                str(row.prompt_tokens),
                count(row.here.uncached_tokens),
                count(row.there.uncached_tokens),
                _name(row.here),
                _name(row.there),
                seconds(row.here.latency_s),
                seconds(row.there.latency_s),
                seconds(row.saved_s),
            )
        yield table
    if rest := moved[MAX_ROWS:]:
        yield Text(f"{_requests(len(rest))} more elsewhere: {_saved(rest, game.stands_for)}")
    if stay:
        yield Text(f"{_requests(len(stay))} where they are: {_saved(stay, game.stands_for)}")
    yield Text(f"all of that: {_saving(game.observed_s - game.after_s)} saved")


def _saving(value_s: float) -> str:
    return seconds(round(value_s, 3) + 0.0)  # nothing is not minus nothing


def _saved(rows: Sequence[Assigned], stands_for: float) -> str:
    saved_s = stands_for * sum(row.saved_s for row in rows)
    return f"{seconds(abs(saved_s))} {'saved' if saved_s >= 0 else 'more'} in all"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _shortened(request_id: str) -> str:
    # It may be anything, a terminal's commands included.
    shown = ascii(request_id)[1:-1]
    return shown if len(shown) <= SHOWN_ID else f"{shown[:SHOWN_ID]}…"


def _name(place: Place) -> str:
    return f"{place.worker_id}/{place.dp_rank}"
