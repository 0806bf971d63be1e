"""The benchmark's command: what it refuses, what it does when a figure cannot be measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_poa.bench.control import Lengths, main, measure_all
from dynamo_poa.bench.report import Figure, MeasurementError, Report, commit_of, plain, this_machine


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--only", "swap,speed"], "--only speed: must be some of ingest, tick, swap"),
        (["--minutes", "0"], "--minutes 0: must be > 0 and <= 1440"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: its folder must exist"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(argv, said, capsys):
    """Status 2: key, value, bound."""
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_figure_that_cannot_be_measured_does_not_keep_the_rest_from_it():
    """It is named with its reason."""

    def good(lengths, say):
        say(f"{lengths.swaps} swaps")
        return Figure(name="good", title="t", measures=(plain("k", "w", 1.0, "s"),))

    def void(lengths, say):
        raise MeasurementError("load = 3 requests/s: must be >= 60")

    def cut(lengths, say):
        raise TimeoutError

    lines = []
    figures, failed = measure_all({"void": void, "cut": cut, "good": good}, Lengths(swaps=7), lines.append)
    assert [figure.name for figure in figures] == ["good"]
    assert failed == {"void": "load = 3 requests/s: must be >= 60", "cut": "TimeoutError"}
    assert lines == [
        "void ...",
        "  not measured: load = 3 requests/s: must be >= 60",
        "cut ...",
        "  not measured: TimeoutError",
        "good ...",
        "  7 swaps",
    ]


def test_a_report_carries_the_machine_it_was_made_on():
    """Results without a build stamp cannot be repeated."""
    machine = this_machine()
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.cores >= 1
    assert machine.packages.keys() == {
        "dynamo-poa",
        "ai-dynamo",
        "nats-py",
        "uvloop",
        "msgspec",
        "numpy",
        "scipy",
    }
    assert machine.nats_server.startswith("nats-server: v")
    assert Report(machine=machine, figures=(), failed={}, seconds=1.0).machine is machine


def test_help_costs_no_import_of_dynamo():
    """`--help` answers at once and names every figure."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_poa.bench.control", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "some of ingest, tick, swap, hop, relay, latency, observe, memory" in " ".join(done.stdout.split())


def test_a_build_with_changes_is_told_from_one_with_others(tmp_path: Path) -> None:
    """Results of two edits of one commit are of two builds, and are never mixed."""
    git = ("git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "m"], check=True)
    clean = commit_of(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    found = []
    for text in ("2", "3", "2"):
        (tmp_path / "f").write_text(text)
        found.append(commit_of(tmp_path))
    assert all(re.fullmatch(clean + r"\+changes\.[0-9a-f]{8}", one) for one in found)
    assert found[0] == found[2] != found[1]
