"""The load generator sees what a client sees, however the bytes are cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Prompt, Result, prompts, take
from dynamo_poa.clock import SystemClock

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":" word","index":0}]}\n\n'
END = b'data: {"choices":[{"text":"","index":0,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
PROMPT = Prompt((1000, 1001), 2)


@asynccontextmanager
async def server(*pieces: bytes, pause_s: float = 0.0, exact: bool = False) -> AsyncIterator[LoadClient]:
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        port = listening.sockets[0].getsockname()[1]
        yield LoadClient("127.0.0.1", port, "m", timeout_s=0.5, exact=exact)
    finally:
        listening.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_tokens_are_counted_across_packet_borders() -> None:
    """A marker split in two counts once."""
    whole = OK + CHUNK * 3 + END
    for cut in range(len(OK), len(whole), 7):
        async with server(whole[:cut], whole[cut:], pause_s=0.001) as client:
            result = await client.complete(PROMPT)
        assert (result.error, result.tokens, client.tokens) == ("", 3, 3), cut


@pytest.mark.parametrize(("count", "error"), [(1, "1 of 2 tokens"), (2, ""), (3, "3 of 2 tokens")])
async def test_an_answer_of_another_length_than_asked_for_can_be_a_failure(count: int, error: str) -> None:
    """A request that goes on at another router must neither lose tokens nor repeat them."""
    async with server(OK + CHUNK * count + END, exact=True) as client:
        assert (await client.complete(PROMPT)).error == error
    async with server(OK + CHUNK * count + END) as client:
        assert (await client.complete(PROMPT)).error == ""


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), "HTTP 503"),
        ((OK, CHUNK, b'data: {"error":{"code":500}}\n\ndata: [DONE]\n\n'), "error in the stream"),
        ((OK, CHUNK), "stream cut"),
        ((OK, b"data: [DONE]\n\n"), "no token"),
        ((), "HTTP nothing"),
    ],
)
async def test_whatever_the_server_does_is_a_result_with_a_reason(
    pieces: tuple[bytes, ...], error: str
) -> None:
    """A failed request is a result, never an exception, and never ok."""
    async with server(*pieces) as client:
        assert (await client.complete(PROMPT)).error == error


async def test_a_silent_server_and_a_closed_port_are_told_apart() -> None:
    """A request that hangs ends with the time limit."""
    async with server(OK, CHUNK, pause_s=1.0) as client:
        assert (await client.complete(PROMPT)).error == "no end within 0.5 s"
    assert (await client.complete(PROMPT)).error.startswith("connection: ")


async def test_the_closed_loop_keeps_as_many_in_flight_as_asked() -> None:
    """Growing starts users at once; shrinking lets requests end."""
    results: list[Result] = []
    async with server(OK + CHUNK, END, pause_s=0.02) as client:
        source = prompts(prompt_tokens=8, max_tokens=2, templates=1, shared_frac=0.5, seed=1)
        loop = ClosedLoop(client, source, results.append, SystemClock())
        loop.resize(4)
        await asyncio.sleep(0.1)
        loop.resize(1)
        await asyncio.sleep(0.1)
        await loop.finish()
    assert all(result.ok for result in results)
    assert len(results) >= 8


def test_prompts_have_exact_lengths_shared_prefixes_and_a_seed() -> None:
    """5 templates, 3/4 shared: the first three quarters are one of five prefixes."""

    def make() -> list[Prompt]:
        source = prompts(prompt_tokens=128, max_tokens=4, templates=5, shared_frac=0.75, seed=3)
        return take(source, 50)

    made = make()
    assert {len(prompt.token_ids) for prompt in made} == {128}
    assert len({prompt.token_ids[:96] for prompt in made}) == 5
    assert len({prompt.token_ids for prompt in made}) == 50
    assert made == make()
