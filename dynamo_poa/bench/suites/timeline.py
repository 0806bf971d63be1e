"""Time: what the controllers recorded while the load changed.

Owns: the panels of PoA-hat, TTFT and parameters against time, the marks where phases begin.
Does not own: curves against load (plots.py), colours and SVG (canvas.py).
Invariant: a value that was not known is a gap, never 0.
"""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamo_poa.bench.suites import arranged
from dynamo_poa.bench.suites.canvas import FAINT, Look, Plot, draw, legend, looks, value_axis
from dynamo_poa.bench.suites.cells import Point, Result

HEIGHT_IN = 6.2


def over_time(results: Sequence[Result]) -> Iterator[Plot]:
    """Yield what the controllers recorded while the load changed, for the first seed of each group."""
    data = [r for r in arranged.done(results) if r.cell.phases and r.series]
    styles = looks(arranged.policy_names(results), arranged.default_policy(results))
    groups = arranged.grouped(data, lambda r: f"{r.cell.fleet.name}, {r.cell.content.name}")
    for number, (where, cells) in enumerate(groups.items()):
        seed = min(result.cell.seed for result in cells)
        shown = [result for result in cells if result.cell.seed == seed]
        names = tuple(dict.fromkeys(result.cell.policy.name for result in shown))

        def paint(
            canvas: Figure,
            shown: list[Result] = shown,
            names: tuple[str, ...] = names,
        ) -> None:
            panels = canvas.subplots(3, 1, sharex=True)
            for result in shown:
                _record(panels, result.series, styles[result.cell.policy.name], result.cell.policy.name)
            _mark_phases(panels, shown[0].series)
            for axes, values in zip(panels[:2], _recorded(shown), strict=True):
                value_axis(axes, values)
            panels[0].set_ylabel("PoA-hat (ratio)")
            panels[1].set_ylabel("TTFT, P99 (s)")
            panels[2].set_ylabel("τ (solid), ω (dotted)")
            panels[2].set_xlabel("time since the first record (s)")
            legend(canvas, panels[0], names)

        yield draw(
            f"time-{number}",
            f"Over the phases of the load: {where}",
            f"The controllers' own records, seed {seed}; the vertical lines are where the load changed. "
            "A gap is a time without an estimate.",
            HEIGHT_IN,
            paint,
        )


def _record(panels: Sequence[Axes], series: Sequence[Point], look: Look, name: str) -> None:
    start_s, gap = series[0].at_s, float("nan")
    at = [point.at_s - start_s for point in series]

    def known(values: Sequence[float | None]) -> list[float]:
        return [gap if value is None else value for value in values]

    panels[0].plot(at, known([point.poa_hat for point in series]), color=look.colour, label=name)
    panels[1].plot(at, known([point.ttft_p99_s for point in series]), color=look.colour)
    panels[2].step(at, known([p.router_temperature for p in series]), where="post", color=look.colour)
    panels[2].step(
        at, known([p.overlap_weight for p in series]), where="post", color=look.colour, linestyle=":"
    )


def _recorded(results: Sequence[Result]) -> tuple[list[float], list[float]]:
    points = [point for result in results for point in result.series]
    return (
        [point.poa_hat for point in points if point.poa_hat is not None],
        [point.ttft_p99_s for point in points if point.ttft_p99_s is not None],
    )


def _mark_phases(panels: Sequence[Axes], series: Sequence[Point]) -> None:
    start_s, before = series[0].at_s, None
    for point in series:
        if point.phase != before:
            for axes in panels:
                axes.axvline(point.at_s - start_s, color=FAINT, linewidth=1)
            panels[0].text(
                point.at_s - start_s,
                1.01,
                f" {point.phase}",
                transform=panels[0].get_xaxis_transform(),
                va="bottom",
            )
            before = point.phase
