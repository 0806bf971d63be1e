"""How a worker is asked what its cache holds: one question and its answer, on Dynamo's request plane.

Owns: the question's connections, from opening to closing; what is asked.
Does not own: bytes (frames.py, wire.py), where the worker is (dynamo_host.py), when it is asked (resync.py).
Invariant: whatever comes, it ends within ANSWER_S with an answer or one of two errors, its sockets closed.
           What an answer amounts to is worked out beside the event loop.
Source: host: each publisher of kv-events serves `worker_kv_query_source_<its id in hex>` beside `generate`,
        but where `enable_local_indexer` is off; Dynamo's routers ask it when they begin or miss events.
        Measured on 1.4.2: Dynamo's own Python client drops the answer, which is none of its annotated ones.
"""

import asyncio
import uuid

import msgspec

from dynamo_poa.cache_whole import CacheWhole, whole_of
from dynamo_poa.errors import FrameError, WorkerUnreachable
from dynamo_poa.frames import (
    ACCEPTED,
    TWO_PART,
    TwoPart,
    error_of,
    request_frame,
    split_transport,
    subject_of,
    two_part,
)
from dynamo_poa.values import WorkerKey
from dynamo_poa.wire import cache_held

ANSWER_S = 30.0  # a cache of millions of blocks takes seconds
MAX_ANSWER_BYTES = 512 * 2**20  # of three million blocks: 172 bytes each


async def ask_cache(transport: str, key: WorkerKey) -> CacheWhole:
    """Return what lies in the cache of a rank.

    Args:    transport: `host:port/path` of the endpoint that answers, as discovery has it.
    Raises:  WorkerUnreachable when there is no answer; WireError when it is not the whole of a cache.
    Source:  measured, longest that the event loop waits meanwhile: 6 to 15 ms for 25,000 blocks, 12 to 22 for
             100,000, 53 to 131 for 500,000: one call cuts the answer into its events, 0.2 us each.
    """
    try:
        host, port, path = split_transport(transport)
        async with asyncio.timeout(ANSWER_S):
            body = await _asked(host, port, path, key)
    except (OSError, EOFError, FrameError) as error:  # a TimeoutError is an OSError
        raise WorkerUnreachable(key.worker_id, f"cache: {error!r}") from error
    return await asyncio.to_thread(_read, body)  # seconds, of a large one


def _read(body: bytearray) -> CacheWhole:
    return whole_of(cache_held(body))


async def _asked(host: str, port: int, path: str, key: WorkerKey) -> bytearray:
    subject, answer = str(uuid.uuid4()), asyncio.get_running_loop().create_future()
    backs: list[asyncio.StreamWriter] = []

    async def dialled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backs.append(writer)
        try:
            if answer.done():  # it is over: nobody would close this one
                return
            body = await _answer(reader, subject)
            if not answer.done():
                answer.set_result(body)
        except (OSError, EOFError, FrameError) as error:
            if not answer.done():
                answer.set_exception(error)
        finally:
            writer.close()

    reader, writer = await asyncio.open_connection(host, port)
    server = None
    try:
        # The worker dials back to where it is seen from.
        own = writer.get_extra_info("sockname")[0]
        server = await asyncio.start_server(dialled, own, 0)
        back = f"{own}:{server.sockets[0].getsockname()[1]}"
        writer.write(question(path, key, subject, back))
        await writer.drain()
        said = await reader.readexactly(len(ACCEPTED))
        if said != ACCEPTED:
            raise FrameError("refused", f"{int.from_bytes(said)} bytes of why")
        result: bytearray = await answer
        return result
    finally:
        answer.cancel()
        # Not waited for: from Python 3.12.1 on that takes until the last connection is closed.
        if server is not None:
            server.close()
        for each in (writer, *backs):  # one that dialled back and says nothing would stay for ever
            each.close()


def question(path: str, key: WorkerKey, subject: str, back: str) -> bytes:
    """Return the request frame that asks for the whole of a rank's cache.

    Args:  subject: what the answer is to name, at `back`.
    """
    name = str(uuid.uuid4())
    info = {"address": back, "subject": subject, "context": name, "stream_type": "response"}
    control = {
        "id": name,
        "request_type": "single_in",
        "response_type": "many_out",
        "payload_codec": "msgpack",
        "connection_info": {"transport": "tcp_server", "info": msgspec.json.encode(info).decode()},
    }
    body = {
        "worker_id": key.worker_id,
        "dp_rank": key.dp_rank,
        "start_event_id": None,
        "end_event_id": None,
        "supports_tree_dump_failed": True,
    }
    headers = msgspec.json.encode({"x-endpoint-path": path, "request-id": name})
    return request_frame(path, headers, two_part(msgspec.json.encode(control), msgspec.msgpack.encode(body)))


async def _answer(reader: asyncio.StreamReader, subject: str) -> bytearray:
    """Return the body of the first data frame of an answer."""
    if subject_of(await _frame(reader)) != subject:
        raise FrameError("handshake", "an answer to something else")
    if (error := error_of(await _frame(reader))) is not None:
        raise FrameError("prologue", error)
    header_bytes, body_bytes = await _sizes(reader)
    await reader.readexactly(header_bytes)
    # Put together as it comes: read whole it would be copied in one piece, 0.06 s for 500,000 blocks.
    body = bytearray()
    while len(body) < body_bytes:
        piece = await reader.read(body_bytes - len(body))
        if not piece:
            raise asyncio.IncompleteReadError(b"", body_bytes)
        body += piece
    return body


async def _frame(reader: asyncio.StreamReader) -> TwoPart:
    header_bytes, body_bytes = await _sizes(reader)
    header = await reader.readexactly(header_bytes)
    return TwoPart(raw=b"", header=header, body=await reader.readexactly(body_bytes))


async def _sizes(reader: asyncio.StreamReader) -> tuple[int, int]:
    header_bytes, body_bytes, _ = TWO_PART.unpack(await reader.readexactly(TWO_PART.size))
    if header_bytes + body_bytes > MAX_ANSWER_BYTES:
        raise FrameError("part_size", f"{header_bytes + body_bytes} bytes: must be <= {MAX_ANSWER_BYTES}")
    return header_bytes, body_bytes
