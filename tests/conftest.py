"""Fixtures shared by the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from nats_server import NatsServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running server with JetStream, on a port and store of its own."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands and processes set logging up for their whole process, which in a test is everybody's."""
    yield
    structlog.reset_defaults()
