"""Maps: τ × ω against the default, who was given the requests, every split of the workers.

Owns: which maps results give and what each is read for.
Does not own: curves (plots.py), colours and SVG (canvas.py), comparisons (paired.py).
Invariant: a field without data is empty; one inside the noise says `=`, whatever its colour would be.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.canvas import BETTER_TO_WORSE, INK, WORSE_TO_BETTER, Plot, draw
from dynamo_poa.bench.suites.cells import Fleet, Result
from dynamo_poa.bench.suites.paired import Comparison, typical
from dynamo_poa.bench.suites.standing import against_default

ROW_IN = 0.3
SETTING_FIGURES = (("ttft_mean_s", "TTFT mean"), ("ttft_p99_s", "TTFT P99"), ("throughput_rps", "throughput"))
SPLIT_FIGURES = (
    ("ttft_p99_s", "TTFT, P99 (s)"),
    ("itl_p99_s", "ITL, P99 (s)"),
    ("throughput_rps", "throughput (requests/s)"),
)


class Field(NamedTuple):
    """One field of a map: what its colour says, its text, and whether it is framed."""

    value: float
    text: str
    best: bool = False


def settings(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield the τ × ω map, a row of panels per load, as ratios to the default setting."""
    names = arranged.setting_names(results)
    default = arranged.default_policy(results)
    if not names or default is None:
        return
    data = [r for r in arranged.done(results) if r.cell.policy.name in names | {default}]
    groups = arranged.grouped(data, lambda r: f"{r.cell.fleet.name}, {r.cell.content.name}")
    for number, (where, cells) in enumerate(groups.items()):
        loads = arranged.grouped(cells, lambda result: result.cell.load.text)
        settings_of = {r.cell.policy.name: r.cell.policy for r in cells if r.cell.policy.name in names}
        temperatures = sorted({policy.router_temperature for policy in settings_of.values()})
        weights = sorted({policy.overlap_credit for policy in settings_of.values()}, reverse=True)
        if not temperatures:
            continue

        def paint(
            canvas: Figure,
            loads: dict[str, tuple[Result, ...]] = loads,
            temperatures: list[float] = temperatures,
            weights: list[float] = weights,
        ) -> None:
            grid = canvas.subplots(len(loads), len(SETTING_FIGURES), squeeze=False)
            for row, (load, members) in zip(grid, loads.items(), strict=True):
                for axes, (figure, title) in zip(row, SETTING_FIGURES, strict=True):
                    fields = _setting_fields(members, figure, temperatures, weights)
                    colours = WORSE_TO_BETTER if figure == "throughput_rps" else BETTER_TO_WORSE
                    _map(axes, fields, colours, LogNorm(1 / 1.5, 1.5))
                    axes.set_xticks(np.arange(len(temperatures)) + 0.5, [f"{t:g}" for t in temperatures])
                    axes.set_yticks(np.arange(len(weights)) + 0.5, [f"{w:g}" for w in weights])
                    axes.set_title(f"{title}, {load}", fontsize=9)
                    axes.set_xlabel("τ, router temperature")
                row[0].set_ylabel("ω, overlap weight")

        yield draw(
            f"settings-{number}",
            f"τ × ω against {default}: {where}",
            "Each field: the figure as a multiple of the default's, the median over paired seeds. Blue is "
            "better, vermillion worse, full colour at 1.5 times. =: no difference, the 95 % interval holds 1;"
            " ?: too few seeds to say. The best of many is partly luck: confirm it on other seeds.",
            (0.95 + ROW_IN * len(weights)) * len(loads),
            paint,
        )


def _setting_fields(
    results: Sequence[Result], figure: str, temperatures: list[float], weights: list[float]
) -> list[list[Field | None]]:
    policies = {result.cell.policy.name: result.cell.policy for result in results}
    fields: list[list[Field | None]] = [[None] * len(temperatures) for _ in weights]
    found = against_default(results, figure)
    for name, policy in policies.items():
        if policy.router_temperature not in temperatures or policy.overlap_credit not in weights:
            continue
        field = None
        if arranged.is_default(policy):
            field = Field(1.0, "default")
        elif name in found:
            field = _setting_field(found[name])
        fields[weights.index(policy.overlap_credit)][temperatures.index(policy.router_temperature)] = field
    return fields


def _setting_field(found: Comparison) -> Field | None:
    if found.verdict == "no difference":
        return Field(1.0, "=")
    if found.ratio is None:
        return None
    # Without a verdict the figure is shown, and that it is no more than that.
    return Field(found.ratio, f"{found.ratio:.2f}" + "?" * (found.verdict == "no verdict"))


def picks(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield who was given the requests, a panel per fleet and content at their highest load."""
    data = [result for result in arranged.lines(arranged.done(results)) if result.picks]
    groups = arranged.grouped(
        data, lambda r: (r.cell.fleet.name, r.cell.content.name, arranged.place(r.cell.load).unit)
    )
    for number, ((fleet, content, _), cells) in enumerate(groups.items()):
        top = max(arranged.place(result.cell.load).value for result in cells)
        shown = [result for result in cells if arranged.place(result.cell.load).value == top]
        names = arranged.policy_names(shown)
        workers = sorted({worker for result in shown for worker in result.picks}, key=_worker_order)

        def paint(
            canvas: Figure,
            shown: list[Result] = shown,
            names: tuple[str, ...] = names,
            workers: list[str] = workers,
        ) -> None:
            axes = canvas.subplots()
            fields: list[list[Field | None]] = []
            for name in names:
                shares = shares_of([result.picks for result in shown if result.cell.policy.name == name])
                fields.append([_share_field(shares, worker) for worker in workers])
            _map(axes, fields, BETTER_TO_WORSE, Normalize(0.0, 2.0))
            labels = [_worker_label(worker, shown[0].cell.fleet) for worker in workers]
            axes.set_xticks(np.arange(len(workers)) + 0.5, labels)
            axes.set_yticks(np.arange(len(names)) + 0.5, names)

        yield draw(
            f"picks-{number}",
            f"Requests by worker: {fleet}, {content}, {shown[0].cell.load.text}",
            "Share of the requests that a role's workers took, all seeds together. Colourless: an equal "
            "share; blue: fewer; vermillion: more, full colour at twice as many.",
            0.75 + ROW_IN * len(names),
            paint,
        )


def shares_of(picks: Sequence[dict[str, int]]) -> dict[str, float]:
    """Return each worker's share of the requests that workers of its role took; of no request, none."""
    totals: dict[str, int] = {}
    for taken in picks:
        for worker, number in taken.items():
            totals[worker] = totals.get(worker, 0) + number
    by_role: dict[str, int] = {}
    for worker, number in totals.items():
        by_role[_role(worker)] = by_role.get(_role(worker), 0) + number
    return {w: number / by_role[_role(w)] for w, number in totals.items() if by_role[_role(w)]}


def _share_field(shares: dict[str, float], worker: str) -> Field | None:
    if not any(_role(other) == _role(worker) for other in shares):
        return None
    share, equals = shares.get(worker, 0.0), sum(_role(other) == _role(worker) for other in shares)
    return Field(share * equals, f"{share:.0%}")


def _role(worker: str) -> str:
    return worker.rpartition("-")[0]


def _worker_order(worker: str) -> tuple[bool, str, int]:
    role, _, number = worker.rpartition("-")
    return role != "prefill", role, int(number) if number.isdecimal() else 0


def _worker_label(worker: str, fleet: Fleet) -> str:
    """Return a worker's name and how it differs from the others."""
    role, _, number = worker.rpartition("-")
    marks = [f"{s.factor:g}x slow" for s in fleet.slow if (s.role, str(s.number)) == (role, number)]
    if fleet.stall is not None and (fleet.stall.role, str(fleet.stall.number)) == (role, number):
        marks.append("stalls")
    return "\n".join([f"{role} {number}", *marks])


def splits(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield every split of the same workers against load, a plot per content and number of workers."""
    default = arranged.default_policy(results)
    data = [r for r in arranged.done(results) if r.cell.policy.name == default]
    for number, cells in enumerate(arranged.splits(data)):
        columns = arranged.split_names(cells)
        loads = arranged.grouped(cells, lambda r: r.cell.load.text)
        rows = sorted(loads, key=lambda load: arranged.place(loads[load][0].cell.load)[::-1], reverse=True)

        def paint(
            canvas: Figure,
            loads: dict[str, tuple[Result, ...]] = loads,
            rows: list[str] = rows,
            columns: tuple[str, ...] = columns,
        ) -> None:
            panels = canvas.subplots(1, len(SPLIT_FIGURES), sharey=True)
            for axes, (figure, title) in zip(panels, SPLIT_FIGURES, strict=True):
                higher = figure == "throughput_rps"
                fields = [_split_fields(loads[load], figure, columns, higher=higher) for load in rows]
                _map(axes, fields, WORSE_TO_BETTER if higher else BETTER_TO_WORSE, LogNorm(0.25, 4.0))
                axes.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=8)
                axes.set_title(title)
            panels[0].set_yticks(np.arange(len(rows)) + 0.5, rows)

        fleet = cells[0].cell.fleet
        yield draw(
            f"splits-{number}",
            f"Every split of {fleet.prefill + fleet.decode} workers: {cells[0].cell.content.name}, {default}",
            "Rows are loads, columns prefill and decode workers. Colour: against the median split of the "
            "row, blue better, vermillion worse; framed: the best of the row. TTFT is what prefill workers "
            "buy, ITL what decode workers buy.",
            1.0 + ROW_IN * len(rows),
            paint,
        )


def _split_fields(
    results: Sequence[Result], figure: str, columns: Sequence[str], *, higher: bool
) -> list[Field | None]:
    by_split = arranged.grouped(results, lambda result: result.cell.fleet.topology)
    found = {name: typical(by_split.get(name, ()), figure) for name in columns}
    values = {
        name: interval.median
        for name, interval in found.items()
        if interval is not None and interval.median > 0
    }
    if not values:
        return [None] * len(columns)
    shown = {name: short(value) for name, value in values.items()}
    best, middle = arranged.best(values, shown, higher=higher), float(np.median(list(values.values())))
    return [
        Field(values[name] / middle, shown[name], best=name in best) if name in values else None
        for name in columns
    ]


def short(value: float) -> str:
    """Return a value in the few letters that a field holds."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _map(axes: Axes, fields: list[list[Field | None]], colours: Colormap, scale: Normalize) -> None:
    """Draw fields, the first row on top, each with its text in what can be read on its colour."""
    values: NDArray[np.float64] = np.array(
        [[np.nan if field is None else field.value for field in row] for row in fields]
    )
    axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=colours, norm=scale, edgecolors="white", linewidth=0.6, alpha=1.0
    )
    axes.set_ylim(len(fields), 0)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row, line in enumerate(fields):
        for column, field in enumerate(line):
            if field is None:
                axes.text(column + 0.5, row + 0.5, "-", ha="center", va="center", color=INK)
                continue
            red, green, blue, _ = colours(scale(field.value))
            if field.best:
                frame = Rectangle(
                    (column, row), 1, 1, fill=False, edgecolor="#111111", linewidth=1.8, zorder=3
                )
                axes.add_patch(frame)
            light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
            axes.text(
                column + 0.5,
                row + 0.5,
                field.text,
                ha="center",
                va="center",
                fontsize=8,
                color="#111111" if light else "#ffffff",
            )
