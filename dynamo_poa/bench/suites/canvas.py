"""What every plot has in common: colours all can tell apart, ink that suits the page, SVG without a script.

Owns: palette and markers, the style, how a figure becomes one SVG element that can stand inside a page.
Does not own: what is drawn (plots.py, maps.py), where it stands (page.py).
Invariant: the same plot of the same results is the same text; its ids are its own, so that many share a page;
           text is text; nothing is fetched.
Source: palette: Okabe and Ito, Color Universal Design (2008), without its yellow, which white paper swallows.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK = "#010203"  # stands for the page's own colour of text until the SVG is written
FAINT = "#040506"  # the page's colour of lines that are not data
BLUE, VERMILLION = "#0072b2", "#d55e00"
PALETTE = ("#e69f00", "#56b4e9", "#009e73", VERMILLION, BLUE, "#cc79a7", "#8c8c8c")
MARKERS = ("s", "^", "D", "v", "P", "X", "h", "<", ">")
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)))
REGIME_COLOURS = {"below": "#009e73", "transition": "#e69f00", "saturated": VERMILLION}
# Blue is better and vermillion worse, here as in the page's tables.
BETTER_TO_WORSE = LinearSegmentedColormap.from_list("better to worse", (BLUE, "#f4f4f4", VERMILLION))
WORSE_TO_BETTER = BETTER_TO_WORSE.reversed()
WIDTH_IN = 9.6
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.5,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "legend.fontsize": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # names are text, with dollars too
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
}


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A picture, what it shows and how to read it."""

    name: str
    title: str
    reading: str
    svg: str


class Look(NamedTuple):
    """How a policy is drawn, in every plot of a page."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[float, ...]]
    width: float


def looks(names: Sequence[str], default: str | None) -> dict[str, Look]:
    """Return each policy's look: the default in the page's ink, the others in turn."""
    others = [name for name in names if name != default]
    result = {
        name: Look(
            PALETTE[number % len(PALETTE)],
            MARKERS[number % len(MARKERS)],
            DASHES[number // len(PALETTE) % len(DASHES)],
            1.6,
        )
        for number, name in enumerate(others)
    }
    return result if default is None else {default: Look(INK, "o", "solid", 2.4), **result}


def draw(name: str, title: str, reading: str, height_in: float, paint: Callable[[Figure], None]) -> Plot:
    """Return what `paint` puts on an empty figure as a plot."""
    # The salt makes ids depend on the picture alone.
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.04)
        figure = Figure(figsize=(WIDTH_IN, height_in), layout=layout)
        FigureCanvasSVG(figure)
        paint(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name=name, title=title, reading=reading, svg=_element(written.getvalue(), name, title))


def _element(document: str, name: str, title: str) -> str:
    """Return a document's SVG element: ids of its own, the page's colours, a name for who cannot see it."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(FAINT, "var(--faint, #999)")
    svg = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \g<1>var(--plot-font, sans-serif)", svg)
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{_escaped(title)}">{rest}'.strip()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def log_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the horizontal axis logarithmic with a labelled tick at each of a few values, written out."""
    axis = axes.xaxis
    axes.set_xscale("log")
    axis.set_major_locator(FixedLocator(_thinned(sorted(set(values)))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _thinned(values: list[float]) -> list[float]:
    """Return the values without those too near the one before, on a logarithmic axis."""
    kept: list[float] = []
    for value in values:
        if value > 0 and (not kept or value / kept[-1] >= 1.25):
            kept.append(value)
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from `low` to `high`, and one beyond at either end."""
    steps = [step * 10.0**power for power in range(-7, 8) for step in (1, 2, 5)]
    inside = [number for number, value in enumerate(steps) if low <= value <= high]
    first = next(number for number, value in enumerate(steps) if value > low)
    start, stop = (inside[0], inside[-1]) if inside else (first, first - 1)
    return steps[max(start - 1, 0) : stop + 2]


def value_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the vertical axis logarithmic, from the tick below the least value to that above the greatest."""
    known = [value for value in values if value > 0]
    if not known:
        return
    at = ticks(min(known), max(known))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(at))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(at[0], at[-1])


def change_axis(axes: Axes, reach: float) -> None:
    """Make the horizontal axis one of ratios around 1, as far to either side, ticks written as changes."""
    reach = max(reach, 1.1) ** 1.12
    axes.set_xscale("log")
    axes.set_xlim(1 / reach, reach)
    axis, steps = axes.xaxis, (1.05, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, 50.0)
    step = max((step for step in steps if step <= reach), default=1.05)
    between = step**0.5 if step > 2 else None
    at = [1 / step, 1.0, step] + ([1 / between, between] if between else [])
    axis.set_major_locator(FixedLocator(sorted(at)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * (value - 1):+.0f} %" if value != 1 else "0")
    )


def legend(canvas: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Name the policies once, under all panels, the default first."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    known = [name for name in names if name in found]
    canvas.legend(
        [found[name] for name in known], known, loc="outside lower left", ncols=4, borderaxespad=0.2
    )
