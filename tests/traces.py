"""Where the real traces are: beside the repository, never in it."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("DYN_POA_TRACES") or Path(__file__).parents[2] / "shared" / "data")


def real_trace(name: str) -> Path:
    """Return the file, or skip the test."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER} (DYN_POA_TRACES names another folder)")
    return path
