"""A worker's cache is asked for over the request plane: a worker of sockets answers as real ones do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_poa import cache_question
from dynamo_poa.cache_question import ask_cache
from dynamo_poa.clock import ManualClock
from dynamo_poa.dynamo_host import WorkerDirectory, _Watch
from dynamo_poa.errors import WireError, WorkerUnreachable
from dynamo_poa.frames import (
    ACCEPTED,
    FINAL_BODY,
    RequestParser,
    control,
    handshake,
    prologue,
    read_request,
    split_address,
    two_part,
)
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import KvEvent, KvStored, Tier, cache_held

W1 = 2**63 + 21
STORED = {
    "parent_hash": None,
    "start_position": None,
    "blocks": [{"block_hash": 2**64 - 1, "tokens_hash": 7, "mm_extra_info": None}],
}
DUMP = {
    "TreeDump": {
        "events": [
            {
                "worker_id": W1,
                "storage_tier": "device",
                "event": {"event_id": 0, "data": {"stored": STORED}, "dp_rank": 3},
            }
        ],
        "last_event_id": 17,
    }
}


def body_of(data: Any) -> bytes:
    return msgspec.msgpack.encode({"data": data, "complete_final": False})


def answered(data: Any) -> bytes:
    """What follows the handshake of an answer."""
    return prologue() + two_part(b"", body_of(data)) + two_part(b"", FINAL_BODY) + control("sentinel")


class Worker:
    """Takes a question, says so, and dials back with an answer."""

    def __init__(self, answer: bytes, *, said: bytes = ACCEPTED, subject: str | None = None) -> None:
        self.answer, self.said, self.subject = answer, said, subject
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.transport = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Worker"]:
        server = await asyncio.start_server(self._on_question, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            self.transport = f"127.0.0.1:{port}/8000000000000015/worker_kv_query_source_ab"
            yield self

    async def _on_question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = RequestParser()
        while (frame := parser.next()) is None:
            if not (data := await reader.read(65536)):
                return
            parser.feed(data)
        request = read_request(frame)
        fields = ("worker_id", "dp_rank", "start_event_id", "end_event_id", "supports_tree_dump_failed")
        self.asked.append((frame.path, {field: request.get(field) for field in fields}))
        writer.write(self.said)
        if self.said == ACCEPTED:
            _, back = await asyncio.open_connection(*split_address(request.address))
            back.write(handshake(self.subject or request.subject) + self.answer)
            back.close()
        writer.close()


async def test_the_whole_of_a_rank_s_cache_is_asked_for_and_read() -> None:
    """Measured on Dynamo 1.4.2: the answer is one frame, in the form of an enum of the worker's own."""
    async with Worker(answered(DUMP)).serving() as worker:
        held = await ask_cache(worker.transport, WorkerKey(W1, 3))
    assert held.last_event_id == 17
    assert {tier: blocks.blocks() for tier, blocks in held.tiers.items()} == {Tier.DEVICE: {2**64 - 1}}
    assert held.tiers[Tier.DEVICE].chain(2**64 - 1) == 7
    question = {
        "worker_id": W1,
        "dp_rank": 3,
        "start_event_id": None,
        "end_event_id": None,
        "supports_tree_dump_failed": True,
    }
    assert worker.asked == [("8000000000000015/worker_kv_query_source_ab", question)]


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (Worker(b"", said=b"\x00\x00\x00\x04busy"), "refused"),
        (Worker(prologue("no such rank")), "no such rank"),
        (Worker(answered(DUMP), subject="another"), "an answer to something else"),
        (Worker(prologue()), "IncompleteReadError"),
        (Worker(prologue() + b"\xff" * 24), "part_size"),
        (Worker(b"\x00" * 24), "prologue"),
    ],
)
async def test_a_worker_that_gives_no_answer_is_told_as_one_error(worker: Worker, why: str) -> None:
    """Contract: foreign errors are mapped once, and nothing waits for ever."""
    async with worker.serving():
        with pytest.raises(WorkerUnreachable, match=why):
            await ask_cache(worker.transport, WorkerKey(W1, 0))


@pytest.mark.parametrize("transport", ["127.0.0.1:1/8000/worker_kv_query_source_ab", "nowhere"])
async def test_nobody_there_is_the_same_error(transport: str) -> None:
    """It may have died since discovery listed it."""
    with pytest.raises(WorkerUnreachable, match="cache: "):
        await ask_cache(transport, WorkerKey(W1, 0))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"TreeDumpFailed": {"last_event_id": 3, "message": "busy"}},
        {"TooNew": {"requested_start": 9, "requested_end": None, "newest_available": 3}},
        {"TreeDump": {"events": [{"worker_id": -1}], "last_event_id": 3}},
        {"TreeDump": {"events": [], "last_event_id": -1}},
    ],
)
async def test_an_answer_that_is_not_the_whole_cache_is_refused(data: Any) -> None:
    """Contract: decoded whole or refused with a reason."""
    async with Worker(answered(data)).serving() as worker:
        with pytest.raises(WireError) as refused:
            await ask_cache(worker.transport, WorkerKey(W1, 0))
    assert refused.value.reason == "answer"


def directory_of(*instances: tuple[int, str, str]) -> WorkerDirectory:
    """Return a directory to which discovery lists these, by id, kind and address."""
    listed = [
        SimpleNamespace(instance_id=worker_id, transport=SimpleNamespace(kind=kind, address=address))
        for worker_id, kind, address in instances
    ]
    directory = WorkerDirectory(None, {}, ManualClock())
    directory._watches.append(_Watch(None, SimpleNamespace(instances=lambda: listed)))
    return directory


async def test_the_question_goes_to_the_publisher_of_the_rank_s_events() -> None:
    """Host: its endpoint is named after the publisher, in hexadecimal, beside the one for requests."""
    async with Worker(answered(DUMP)).serving() as worker:
        requests = worker.transport.rpartition("/")[0] + "/generate"
        directory = directory_of((1, "tcp", "elsewhere:1/x"), (W1, "tcp", requests))
        held = await directory.cache_of(WorkerKey(W1, 3), 0x15B96D18C8A022)
    assert (held.last_event_id, len(held.tiers[Tier.DEVICE])) == (17, 1)
    assert worker.asked[0][0] == "8000000000000015/worker_kv_query_source_15b96d18c8a022"


@pytest.mark.parametrize("instances", [(), ((W1, "nats", "x"),), ((1, "tcp", "elsewhere:1/x"),)])
async def test_a_worker_that_serves_no_such_question_is_unreachable(instances: Any) -> None:
    """On another request plane nobody is asked, nor one that discovery does not list."""
    with pytest.raises(WorkerUnreachable, match=f"worker {W1}: cache: "):
        await directory_of(*instances).cache_of(WorkerKey(W1, 0), 1)


def test_any_bytes_are_read_or_refused() -> None:
    """Invariant: a WireError and nothing else."""
    for body in (b"", b"\xc1", body_of(DUMP)[:-9], b"\x91" * 5000):
        with pytest.raises(WireError):
            cache_held(body)


def test_events_are_decoded_one_by_one_as_they_are_read() -> None:
    """A call that decodes all of them holds up every other thread: 0.9 s for 500,000 blocks."""
    events = DUMP["TreeDump"]["events"]
    held = iter(cache_held(body_of({"TreeDump": {"events": [*events, 5], "last_event_id": 17}})).events)
    assert next(held) == KvEvent(W1, 3, 0, Tier.DEVICE, KvStored(None, (2**64 - 1,), (7,)))
    with pytest.raises(WireError, match="answer"):
        next(held)


async def test_nobody_waits_for_connections_that_are_open_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12.1 on a server's wait_closed takes until the last one is closed."""

    async def until_closed(server: asyncio.Server) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(cache_question, "ANSWER_S", 0.05)
    worker = Silent(b"")
    async with worker.serving():
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Server, "wait_closed", until_closed)
            async with asyncio.timeout(5):
                with pytest.raises(WorkerUnreachable, match="TimeoutError"):
                    await ask_cache(worker.transport, WorkerKey(W1, 3))
        for writer in worker.kept:
            writer.close()


async def test_a_worker_that_dials_back_and_says_nothing_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant: its sockets are closed when the question ends: one that hangs is asked twice a minute."""
    monkeypatch.setattr(cache_question, "ANSWER_S", 0.05)
    worker = Silent(b"")
    async with worker.serving():
        with pytest.raises(WorkerUnreachable, match="TimeoutError"):
            await ask_cache(worker.transport, WorkerKey(W1, 3))
        async with asyncio.timeout(5):
            assert await worker.back.read() == b""  # the end: we have closed it
        for writer in worker.kept:
            writer.close()


class Silent(Worker):
    """Takes a question, dials back, and then says nothing."""

    back: asyncio.StreamReader
    kept: tuple[asyncio.StreamWriter, ...] = ()

    async def _on_question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = RequestParser()
        while (frame := parser.next()) is None:
            parser.feed(await reader.read(65536))
        request = read_request(frame)
        writer.write(ACCEPTED)
        self.back, back = await asyncio.open_connection(*split_address(request.address))
        self.kept = writer, back
        back.write(handshake(request.subject))
