"""A wheel built from the clone serves the shipped graphs from any directory."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "dynamo_poa", "components", "graphs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built from a copy: building leaves traces in its directory."""
    directory = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (directory / "source").mkdir(exist_ok=True)
            shutil.copy(source, directory / "source" / name)
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(directory), str(directory / "source"))
    (built,) = directory.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    """Run pip without looking at the network."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-index", "--disable-pip-version-check", "-q"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_the_wheel_holds_every_module_and_the_graphs_files(wheel: Path) -> None:
    """What the checkout has under the three packages is in the wheel, data and type marker included."""
    expected = {
        str(path.relative_to(ROOT))
        for package in ("dynamo_poa", "components", "graphs")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml", ".typed", ".npz", ".json")
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"graphs/agg_poa.yaml", "graphs/disagg_poa.yaml", "dynamo_poa/py.typed"} <= expected


def test_an_installed_wheel_serves_the_shipped_graphs_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    """Issue: installed elsewhere, by the same command; here up to the printed plan."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--no-deps", "--target", str(site), str(wheel))
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [str(site / "bin" / "dynamo"), "serve", "graphs.disagg_poa:Frontend"]
    done = subprocess.run(
        [*command, "-f", "graphs/disagg_poa.yaml", "--dry-run", "DecodeWorker.workers=1"],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    processes = [
        line.split(". ")[1] for line in done.stdout.splitlines() if line.startswith("# ") and ". " in line
    ]
    assert processes == ["nats", "prefill-0", "prefill-1", "decode-0", "router", "controller", "frontend"]
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import components, dynamo_poa, graphs; print(graphs.__file__)"],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == str(site / "graphs" / "__init__.py")
