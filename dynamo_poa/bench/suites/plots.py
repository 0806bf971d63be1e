"""Curves: policies against the default, latency and PoA-hat against load, latency against throughput.

Owns: which curves results give, their axes and what each is read for.
Does not own: maps (maps.py), time (timeline.py), colours and SVG (canvas.py), comparisons (standing.py).
Invariant: a curve's points are medians over seeds of cells that are done, its bars their 95 % intervals; what
           was not measured leaves a gap; a plot without data is not drawn.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.canvas import (
    BLUE,
    FAINT,
    INK,
    REGIME_COLOURS,
    VERMILLION,
    Look,
    Plot,
    change_axis,
    draw,
    legend,
    log_axis,
    looks,
    value_axis,
)
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.bench.suites.paired import Comparison, Interval, typical
from dynamo_poa.bench.suites.standing import standings

PANEL_IN = 2.7
ASIDE = 1.01  # times a load: policies stand side by side, so that their bars can be told apart
LONGEST_BAR = 5.0  # times down from the median; further it is cut off
LEGEND_IN = 0.22  # a row of the legend
LATENCIES = (
    ("ttft_mean_s", "TTFT, mean (s)"),
    ("ttft_p99_s", "TTFT, P99 (s)"),
    ("itl_p99_s", "ITL, P99 (s)"),
)
ADVANTAGES = (("ttft_mean_s", "TTFT mean"), ("ttft_p99_s", "TTFT P99"), ("throughput_rps", "throughput"))
OVER_SEEDS = "Points are medians over seeds, bars their 95 % intervals."


def forest(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield by how much each policy's figures differ from the default's, with intervals."""
    data = arranged.lines(arranged.done(results))
    default = arranged.default_policy(data)
    rows = [(standing, phase) for phase in arranged.phases(data) for standing in standings(data, phase)]
    columns = [
        (figure, title)
        for figure, title in ADVANTAGES
        if any(phase + figure in standing.against for standing, phase in rows)
    ]
    if default is None or not columns:
        return

    def paint(canvas: Figure) -> None:
        panels = canvas.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, (figure, title) in zip(panels, columns, strict=True):
            shown = [standing.against.get(phase + figure) for standing, phase in rows]
            _differences(axes, shown)
            axes.set_title(title)
            axes.set_xlabel(f"{'higher' if figure == 'throughput_rps' else 'lower'} is better")
        names = [f"{standing.policy}, {phase.rstrip('.')}".rstrip(", ") for standing, phase in rows]
        panels[0].set_yticks(range(len(rows)), names)
        panels[0].set_ylim(len(rows) - 0.4, -0.6)

    yield draw(
        "forest",
        f"Each policy against {default}",
        "Change of the median over pairs with the same fleet, workload, load and seed, and its 95 % "
        "interval. Blue discs: better. Vermillion crosses: worse. Grey strokes: no difference.",
        1.1 + 0.3 * len(rows),
        paint,
    )


def _differences(axes: Axes, shown: Sequence[Comparison | None]) -> None:
    reach = 1.0
    for row, found in enumerate(shown):
        if found is None or found.ratio is None or found.low is None or found.high is None:
            continue
        colour, marker = {"better": (BLUE, "o"), "worse": (VERMILLION, "X")}.get(
            found.verdict, ("#8c8c8c", "|")
        )
        axes.plot((found.low, found.high), (row, row), color=colour, linewidth=3, alpha=0.6)
        axes.plot(found.ratio, row, marker, color=colour, markersize=8)
        reach = max(reach, found.high, 1 / found.low)
    axes.axvline(1.0, color=INK, linewidth=1)
    change_axis(axes, reach)


def latency(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield latency against load, a plot a fleet, content and kind of load; of one load alone none."""
    data = arranged.lines(arranged.done(results))
    styles = _looks(results)
    for number, (where, cells) in enumerate(_by_axis(data).items()):
        fleet, content, unit = where
        shown = [(figure, label) for figure, label in LATENCIES if any(figure in r.figures for r in cells)]
        if len(_loads(cells)) < 2 or not shown:
            continue
        names = arranged.policy_names(cells)

        def paint(
            canvas: Figure,
            cells: tuple[Result, ...] = cells,
            shown: list[tuple[str, str]] = shown,
            names: tuple[str, ...] = names,
            unit: str = unit,
        ) -> None:
            panels = canvas.subplots(1, len(shown), squeeze=False)[0]
            for axes, (figure, label) in zip(panels, shown, strict=True):
                _curves(axes, cells, figure, names, styles)
                log_axis(axes, _loads(cells))
                axes.set_title(label)
                axes.set_xlabel(unit)
            legend(canvas, panels[0], names)

        yield draw(
            f"latency-{number}",
            f"Latency against load: {fleet}, {content}",
            f"Lower is better; both axes logarithmic. {OVER_SEEDS}",
            PANEL_IN + 0.3 + LEGEND_IN * (1 + (len(names) - 1) // 4),
            paint,
        )


def poa(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield PoA-hat against load, the regimes that the controllers told shaded."""
    data = [r for r in arranged.lines(arranged.done(results)) if "poa_hat" in r.figures]
    styles = _looks(results)
    for number, ((fleet, content, unit), cells) in enumerate(_by_axis(data).items()):
        if len(_loads(cells)) < 2:
            continue
        names = arranged.policy_names(cells)
        told = any(point.regime for result in cells for point in result.series)

        def paint(
            canvas: Figure,
            cells: tuple[Result, ...] = cells,
            names: tuple[str, ...] = names,
            unit: str = unit,
        ) -> None:
            axes = canvas.subplots()
            _shade_regimes(axes, cells)
            _curves(axes, cells, "poa_hat", names, styles)
            log_axis(axes, _loads(cells))
            axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.set_xlabel(unit)
            axes.set_ylabel("PoA-hat (ratio)")
            legend(canvas, axes, names)

        regimes = (
            "Shaded: the regime that the controllers told most of the time."
            if told
            else "No controller told a regime, so none is shaded."
        )
        yield draw(
            f"poa-{number}",
            f"PoA-hat against load: {fleet}, {content}",
            "Observed cost of the assignment over that of the best one in hindsight; 1: nothing to gain. "
            f"{regimes} {OVER_SEEDS}",
            PANEL_IN + 0.5 + LEGEND_IN * (1 + (len(names) - 1) // 4),
            paint,
        )


def pareto(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield TTFT P99 against throughput, the settings that nothing beats in both joined by a line."""
    styles = _looks(results)
    shown = {"ttft_p99_s", "throughput_rps"}
    data = [r for r in arranged.done(results) if shown <= r.figures.keys() and not r.cell.phases]
    contents = arranged.grouped(data, lambda r: (r.cell.content.name, arranged.loop(r.cell.load)))
    for number, ((content, loop), cells) in enumerate(contents.items()):
        fleets = arranged.grouped(cells, lambda result: result.cell.fleet.name)
        names = arranged.policy_names(cells)
        if len(names) < 2:
            continue
        rows = (len(fleets) + 1) // 2

        def paint(
            canvas: Figure,
            fleets: dict[str, tuple[Result, ...]] = fleets,
            names: tuple[str, ...] = names,
            rows: int = rows,
        ) -> None:
            grid = canvas.subplots(rows, min(2, len(fleets)), squeeze=False)
            for axes in grid.flat[len(fleets) :]:
                axes.set_visible(False)
            for axes, (fleet, members) in zip(grid.flat, fleets.items(), strict=False):
                _scatter(axes, members, styles)
                axes.set_title(fleet)
                axes.set_xlabel("throughput (requests/s)")
                axes.set_ylabel("TTFT, P99 (s)")
            for name in names:  # a panel may lack some policy
                look = styles[name]
                grid.flat[0].plot([], [], look.marker, color=look.colour, label=name)
            legend(canvas, grid.flat[0], names)

        yield draw(
            f"pareto-{number}",
            f"Tail latency against throughput: {content}, {loop}",
            "Right and down is better. Each point is a policy at one load, the median over seeds; the "
            "stepped line joins the points that no other beats in both.",
            (PANEL_IN + 0.3) * rows + LEGEND_IN * (1 + (len(names) - 1) // 4),
            paint,
        )


def _looks(results: Sequence[Result]) -> dict[str, Look]:
    return looks(arranged.policy_names(results), arranged.default_policy(results))


def _by_axis(results: Sequence[Result]) -> dict[tuple[str, str, str], tuple[Result, ...]]:
    """Return the results that may share a panel."""
    steady = [result for result in results if not result.cell.phases]
    return arranged.grouped(
        steady, lambda r: (r.cell.fleet.name, r.cell.content.name, arranged.place(r.cell.load).unit)
    )


def _loads(results: Sequence[Result]) -> list[float]:
    return sorted({arranged.place(result.cell.load).value for result in results})


def _curves(
    axes: Axes, results: Sequence[Result], figure: str, names: Sequence[str], styles: dict[str, Look]
) -> None:
    """Draw a figure against load for each policy, the first on top, and fit the axis to what is drawn."""
    reached = list[float]()
    for number, name in reversed(list(enumerate(names))):
        own = [result for result in results if result.cell.policy.name == name]
        by_load = arranged.grouped(own, lambda result: arranged.place(result.cell.load).value)
        intervals = {load: typical(cells, figure) for load, cells in sorted(by_load.items())}
        points = [(load, _bar(i)) for load, i in intervals.items() if i is not None and i.median > 0]
        if not points:
            continue
        at, bars = zip(*points, strict=True)
        look, aside = styles[name], ASIDE ** (number - (len(names) - 1) / 2)
        axes.errorbar(
            [load * aside for load in at],
            [bar.median for bar in bars],
            yerr=[[bar.median - bar.low for bar in bars], [bar.high - bar.median for bar in bars]],
            color=look.colour,
            marker=look.marker,
            linestyle=look.dashes,
            linewidth=look.width,
            elinewidth=1,
            label=name,
        )
        reached += (value for bar in bars for value in bar)
    value_axis(axes, reached)


class _Bar(NamedTuple):
    low: float
    median: float
    high: float


def _bar(interval: Interval) -> _Bar:
    """Return an interval's bar, of no length where it is unknown; 0 has no place on a logarithmic axis."""
    low = interval.median if interval.low is None else interval.low
    high = interval.median if interval.high is None else interval.high
    return _Bar(max(low, interval.median / LONGEST_BAR), interval.median, high)


def _shade_regimes(axes: Axes, cells: Sequence[Result]) -> None:
    """Shade from half way, on the logarithmic axis, to the load before up to half way to the next."""
    by_load = arranged.grouped(cells, lambda result: arranged.place(result.cell.load).value)
    loads = sorted(by_load)
    edges = [(low * high) ** 0.5 for low, high in itertools.pairwise(loads)]
    edges = [loads[0] ** 2 / edges[0], *edges, loads[-1] ** 2 / edges[-1]]
    shaded = set[str]()
    for load, low, high in zip(loads, edges, edges[1:], strict=False):
        if (regime := arranged.regime(by_load[load])) is not None:
            axes.axvspan(low, high, color=REGIME_COLOURS[regime], alpha=0.13, linewidth=0)
            if regime not in shaded:
                x = axes.get_xaxis_transform()
                axes.text(low * 1.02, 0.985, f" {regime}", transform=x, va="top", fontsize=8.5)
            shaded.add(regime)
    axes.set_xlim(edges[0], edges[-1])


def _scatter(axes: Axes, results: Sequence[Result], styles: dict[str, Look]) -> None:
    groups = arranged.grouped(results, lambda r: (r.cell.policy.name, r.cell.load.text))
    points = []
    for (name, _), own in groups.items():
        rate, tail = typical(own, "throughput_rps"), typical(own, "ttft_p99_s")
        assert rate is not None
        assert tail is not None
        points.append((rate.median, tail.median))
        look = styles[name]
        axes.plot(rate.median, tail.median, look.marker, color=look.colour, markersize=6, alpha=0.9)
    value_axis(axes, [tail for _, tail in points])
    best = front(points)
    axes.step(*zip(*best, strict=True), where="pre", color=FAINT, linewidth=1.2, zorder=0)
    axes.margins(x=0.08)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (throughput, latency) that no other beats in both, by throughput."""
    best: list[tuple[float, float]] = []
    for rate, tail in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or tail < best[-1][1]:
            best.append((rate, tail))
    return best[::-1]
