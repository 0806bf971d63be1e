"""Counting instances, and asking a process whether it is up, against real files and servers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dynamo_poa.errors import BusError
from dynamo_poa.serve.discovery import count_in_etcd, count_in_folder
from dynamo_poa.serve.graph import HttpOk, ModelListed, NatsReady, Registered
from dynamo_poa.serve.readiness import is_up, shortfall

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Server:
    """An HTTP server that answers every request with what the test has set, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.status = 200
        self.asked: list[tuple[str, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        if isinstance(self.answer, str):
            return web.Response(text=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    yield server
    await runner.cleanup()


def test_instances_are_counted_by_the_whole_path_of_their_endpoint(tmp_path: Path) -> None:
    """dynamo-facts 2: keys are percent-encoded, workers register further endpoints of their own."""
    assert count_in_folder(tmp_path, "poa-workers.backend.generate") == 0
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    for name in (
        "poa%2Dworkers%2Fbackend%2Fgenerate%2Fa5e6fed5518c0cbb",
        "poa%2Dworkers%2Fbackend%2Fgenerate%2Fb5e6fed5518c0cbb",
        "poa%2Dworkers%2Fbackend%2Fworker%5Fkv%5Fquery%5Fsource%5Fa5c%2Fa5e6fed5518c0cbb",
        "poa%2Dworkers%2Fprefill%2Fgenerate%2Fc5e6fed5518c0cbb",
        "poa%2Fbackend%2Fgenerate%2Fd5e6fed5518c0cbb",
    ):
        (folder / name).touch()
    assert count_in_folder(tmp_path, "poa-workers.backend.generate") == 2
    assert count_in_folder(tmp_path, "poa-workers.prefill.generate") == 1
    assert count_in_folder(tmp_path, "poa.backend.generate") == 1


async def test_etcd_is_asked_for_a_prefix_and_answers_a_count(
    server: Server, session: aiohttp.ClientSession
) -> None:
    """etcd's HTTP gateway: keys in base64, the range ends after the prefix, a zero count is left out."""
    server.answer = {"header": {}, "count": "3"}
    assert await count_in_etcd(session, server.url, "ns.backend.generate") == 3
    assert server.asked == [
        (
            "/v3/kv/range",
            {
                "key": "djEvaW5zdGFuY2VzL25zL2JhY2tlbmQvZ2VuZXJhdGUv",  # v1/instances/ns/backend/generate/
                "range_end": "djEvaW5zdGFuY2VzL25zL2JhY2tlbmQvZ2VuZXJhdGUw",  # the same, 0 for /
                "count_only": True,
            },
        )
    ]
    server.answer = {"header": {}}
    assert await count_in_etcd(session, server.url, "ns.backend.generate") == 0


@pytest.mark.parametrize(("status", "answer"), [(500, {}), (200, "<html>"), (200, []), (200, {"count": "x"})])
async def test_an_etcd_that_answers_otherwise_is_a_bus_error(
    server: Server, session: aiohttp.ClientSession, status: int, answer: Any
) -> None:
    """Foreign errors are mapped once, at the edge."""
    server.status, server.answer = status, answer
    with pytest.raises(BusError, match=f"etcd at {server.url}"):
        await count_in_etcd(session, server.url, "ns.backend.generate")


async def test_a_frontend_is_up_when_it_lists_the_model(
    server: Server, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The frontend answers before it knows any model (dynamo-facts 6)."""
    probe = ModelListed(f"{server.url}/v1/models", "llama")
    for answer, up in (
        ({"object": "list", "data": []}, False),
        ({"data": [{"id": "other"}]}, False),
        ({"data": [{"id": "other"}, {"id": "llama"}]}, True),
        ("starting", False),
        ([], False),
    ):
        server.answer = answer
        assert await is_up(probe, session, tmp_path) is up
    assert await shortfall(probe, session, tmp_path) == f"{server.url}/v1/models does not list llama"
    assert not await is_up(ModelListed(f"{NOWHERE}/v1/models", "llama"), session, tmp_path)


@pytest.mark.parametrize(("status", "up"), [(200, True), (503, False), (404, False)])
async def test_our_processes_are_up_when_their_health_is_200(
    server: Server, session: aiohttp.ClientSession, tmp_path: Path, status: int, up: bool
) -> None:
    """A router answers 503 until it has registered."""
    server.status, server.answer = status, "ok"
    assert await is_up(HttpOk(f"{server.url}/health"), session, tmp_path) is up
    assert not await is_up(HttpOk(f"{NOWHERE}/health"), session, tmp_path)


async def test_nats_is_up_when_it_greets(
    server: Server, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Nothing on the port is not NATS; tests/integration has a real server."""
    assert not await is_up(NatsReady("nats://127.0.0.1:1"), session, tmp_path)
    assert (
        await shortfall(NatsReady("nats://h:1"), session, tmp_path) == "no NATS server greets at nats://h:1"
    )


async def test_workers_are_up_when_all_are_listed(
    session: aiohttp.ClientSession, server: Server, tmp_path: Path
) -> None:
    """One of two is not enough (dynamo-facts 2: `wait_for_instances` returns at one)."""
    probe = Registered("ns.backend.generate", 2)
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    (folder / "ns%2Fbackend%2Fgenerate%2F1").touch()
    assert not await is_up(probe, session, tmp_path)
    assert await shortfall(probe, session, tmp_path) == "1 of 2 instances of ns.backend.generate registered"
    (folder / "ns%2Fbackend%2Fgenerate%2F2").touch()
    assert await is_up(probe, session, tmp_path)
    server.answer = {"count": "2"}
    assert await is_up(probe, session, server.url)
    assert not await is_up(probe, session, NOWHERE)
