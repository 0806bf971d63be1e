"""The report: one page that a browser shows without a network, and what stands on it."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import bench_results
import msgspec
import pytest
from chromium import measured

from dynamo_poa.bench.suites import maps, page, plots, timeline
from dynamo_poa.bench.suites.cells import Result
from dynamo_poa.workloads.arrivals import Closed, Poisson, Waves

ALL = {
    "workloads": lambda: [*bench_results.workloads(), *bench_results.void_and_failed()],
    "paper-4": bench_results.grid,
    "splits": bench_results.splits,
    "paper-3": bench_results.over_phases,
}
EXPECTED = {
    "workloads": {"forest": 1, "poa": 3, "latency": 3, "pareto": 2, "picks": 3},
    "paper-4": {"settings": 1, "latency": 1, "pareto": 1, "picks": 1},
    "splits": {"splits": 1},
    "paper-3": {"forest": 1, "time": 1, "picks": 1},
}


@pytest.fixture(scope="module", params=list(ALL))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A suite's page, written once."""
    results = ALL[request.param]()
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    page.write(bench_results.stamp(request.param, len(results)), results, path)
    return request.param, path


def test_a_browser_shows_every_plot(written: tuple[str, Path], tmp_path: Path) -> None:
    """Issue: a page opened in headless Chromium, plots present, whole, no wider than it."""
    suite, path = written
    shown = measured(path, tmp_path)
    kinds = [name.split("-")[1] for name in shown["plots"]]
    assert {kind: kinds.count(kind) for kind in kinds} == EXPECTED[suite]
    for name, plot in shown["plots"].items():
        assert plot["width"] > 600, name
        assert plot["height"] > 60, name
        assert plot["texts"] > 5, name
        assert plot["outside"] == [], name
    assert shown["page"] <= 1200


def test_the_page_stands_alone(written: tuple[str, Path]) -> None:
    """No script, nothing fetched: every address in it is an XML namespace or a place on the page."""
    text = written[1].read_text()
    assert "<script" not in text
    addresses = set(re.findall(r'https?://[^"\s<)]+', text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert all(link.startswith("#") for link in re.findall(r'(?:href|src)="([^"]*)"', text))


def test_ids_are_the_pages_own(written: tuple[str, Path]) -> None:
    """Many plots on one page: an id that is there twice would make one plot borrow another's marks."""
    text = written[1].read_text()
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)


def test_plots_are_well_formed_and_the_same_every_time() -> None:
    """A report of the same results is the same text."""
    results = bench_results.over_phases()
    first, again = (tuple(page.all_plots(results)) for _ in range(2))
    assert first == again
    for plot in first:
        assert ElementTree.fromstring(plot.svg).get("aria-label") == plot.title


def test_void_and_failed_cells_are_listed_with_reasons_and_never_drawn() -> None:
    """Issue: a run whose CPU was the bottleneck is marked void and not reported."""
    good, bad = bench_results.workloads(), bench_results.void_and_failed()
    text = page.page(bench_results.stamp(cells=184), [*good, *bad])
    assert "180 of 184 cells done, 1 void, 1 failed, 2 not run yet" in text
    assert "the processors were busy for 93 %, more than 85 %" in text
    assert "router exited with 1: &lt;no NATS&gt;" in text
    assert tuple(page.all_plots([*good, *bad])) == tuple(page.all_plots(good))


@pytest.mark.parametrize("results", [[], bench_results.void_and_failed()], ids=["none", "none done"])
def test_a_page_without_data_says_so(results: list[Result]) -> None:
    """A run that was stopped at once can be reported too."""
    text = page.page(bench_results.stamp(cells=9), results)
    assert "<svg" not in text
    assert "0 of 9 cells done" in text
    assert "No cell of a default policy is done, so nothing is compared." in text


def test_what_is_missing_is_drawn_as_nothing() -> None:
    """One load makes no curve, one policy no Pareto picture, no phases no time."""
    one = [bench_results.result(bench_results.cell(seed=seed)) for seed in bench_results.SEEDS]
    drawn = (
        *plots.forest(one),
        *plots.poa(one),
        *plots.latency(one),
        *plots.pareto(one),
        *timeline.over_time(one),
        *maps.settings(one),
        *maps.splits(one),
    )
    assert drawn == ()
    assert [plot.name for plot in maps.picks(one)] == ["picks-0"]


def test_open_and_closed_loops_share_no_picture() -> None:
    """Issue: never confused in a result. In an open loop throughput is what was asked for."""
    policies = (bench_results.DEFAULT, bench_results.OURS)
    loads = (Closed(users=8), Poisson(rate_rps=8.0), Waves(mean_rps=8.0, swing_frac=0.5, period_s=9.0))
    mixed = [bench_results.result(bench_results.cell(policy, load)) for load in loads for policy in policies]
    assert [plot.title for plot in plots.pareto(mixed)] == [
        "Tail latency against throughput: paper, closed loop",
        "Tail latency against throughput: paper, open loop",
    ]


def test_failed_requests_stand_with_what_is_missing() -> None:
    """By policy and group; where all is well the page says that too."""
    good = bench_results.workloads()
    assert "no cell is void or failed, and no request failed" in page.page(bench_results.stamp(), good)
    bad = msgspec.structs.replace(good[0], figures={**good[0].figures, "failed": 7.0})
    text = page.page(bench_results.stamp(), [bad, *good[1:]])
    assert "<td>7</td><td>1,500</td>" in text


def test_names_cannot_break_the_page() -> None:
    """A policy's name is text."""
    odd = bench_results.ROUND_ROBIN.__class__(name='<b>"odd" & $x$</b>', router_temperature=0.5)
    results = [
        bench_results.result(bench_results.cell(policy, seed=seed))
        for policy in (bench_results.DEFAULT, odd)
        for seed in bench_results.SEEDS
    ]
    text = page.page(bench_results.stamp(cells=6), results)
    assert "<b>" not in text
    assert text.count("&amp; $x$&lt;/b&gt;</text>") == 3  # in the plots of changes, front and picks
    assert "&lt;b&gt;&quot;odd&quot; &amp; $x$&lt;/b&gt;" in text


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """Replaced at once or not at all: here the half-written one cannot even be begun."""
    path = tmp_path / "report.html"
    path.write_text("old")
    (tmp_path / "report.html.part").mkdir()
    with pytest.raises(IsADirectoryError):
        page.write(bench_results.stamp(), [], path)
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(10.0, 1.0)], [(10.0, 1.0)]),
        ([(10.0, 1.0), (12.0, 1.0), (9.0, 0.5)], [(9.0, 0.5), (12.0, 1.0)]),
        ([(10.0, 1.0), (10.0, 0.8), (5.0, 0.9)], [(10.0, 0.8)]),
    ],
)
def test_the_front_holds_what_nothing_beats_in_both(points, best) -> None:
    """More throughput and less latency are better."""
    assert plots.front(points) == best


def test_shares_are_of_a_roles_requests() -> None:
    """Prefill and decode workers take each request once: both sum to 1."""
    picks = [{"prefill-0": 10, "decode-0": 2, "decode-1": 8}, {"prefill-0": 10, "decode-0": 3, "decode-1": 7}]
    assert maps.shares_of(picks) == {"prefill-0": 1.0, "decode-0": 0.25, "decode-1": 0.75}
    assert maps.shares_of([{"decode-0": 0}]) == {}
