"""Drives a frontend with streaming completions and times what a client sees.

Owns: one HTTP request per connection, its id, its TTFT and outcome; a closed loop of a given concurrency.
Does not own: what the numbers mean (demo.py, the bench reports).
Invariant: every request that was started is accounted for: ok, refused, or failed with a reason.
Source: measured: on kept connections Nagle and delayed acknowledgements add 35-40 ms to the first token,
        so each request has a connection of its own. The response is scanned, not parsed: an HTTP
        library costs more CPU per token than the frontend under test, and they share the machine.
"""

import asyncio
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from dynamo_poa.clock import Clock, SystemClock

_TEXT = b'"text":"'  # one per streamed completion chunk
_NO_TEXT = b'"text":""'  # the last one, which only says why it ends
_ERROR = b'"error"'
_DONE = b"data: [DONE]"
_WORKERS = re.compile(rb'"worker_id":\{(?:"prefill_worker_id":(\d+))?[^}]*?"decode_worker_id":(\d+)')
_TAIL_BYTES = 16  # longer than any marker but the workers', which every chunk repeats
FIRST_TOKEN_ID = 1000  # ids from here on are plain words in the mock model


@dataclass(frozen=True, slots=True)
class Result:
    """One request as its client saw it.

    ttft_s:      None when no token came
    request_id:  what the plugin's decisions call it; empty when the client has not named it
    workers:     ids of the workers that prefilled and decoded, where it was asked and the frontend knows
    """

    started_at_s: float
    ttft_s: float | None
    latency_s: float
    tokens: int
    error: str  # empty when ok
    request_id: str = ""
    workers: tuple[int, int] | None = None

    @property
    def ok(self) -> bool:
        """Tell whether the stream ended as it should."""
        return not self.error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of exact token ids and how many tokens to generate."""

    token_ids: tuple[int, ...]
    max_tokens: int


def prompts(
    *, prompt_tokens: int, max_tokens: int, templates: int, shared_frac: float, seed: int
) -> Iterator[Prompt]:
    """Yield prompts without end: each starts with one of `templates` shared prefixes.

    Args:     shared_frac: share of `prompt_tokens` that the prefix takes, in [0, 1); the rest is unique.
    Source:   paper: 5 prompt templates, 128 input tokens.
    """
    rng = random.Random(seed)
    shared_tokens = int(prompt_tokens * shared_frac)
    prefixes = [
        tuple(rng.randrange(FIRST_TOKEN_ID, 30_000) for _ in range(shared_tokens)) for _ in range(templates)
    ]
    while True:
        rest = tuple(rng.randrange(FIRST_TOKEN_ID, 30_000) for _ in range(prompt_tokens - shared_tokens))
        yield Prompt(rng.choice(prefixes) + rest if templates else rest, max_tokens)


class _Response(asyncio.Protocol):
    """Counts tokens in a streamed response as its bytes arrive."""

    def __init__(
        self, request: bytes, clock: Clock, done: "asyncio.Future[None]", count: Callable[[int], None]
    ) -> None:
        self._request, self._clock, self._done, self._count = request, clock, done, count
        self._tail = b""
        self.first_token_at_s: float | None = None
        self.tokens = 0
        self.status = b""
        self.failed = self.complete = False
        self.workers: tuple[int, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = data[9:12]
        window = self._tail + data  # a marker may be split between two packets
        found = _tokens(window) - _tokens(self._tail)
        if found and self.first_token_at_s is None:
            self.first_token_at_s = self._clock.monotonic_s()
            if told := _WORKERS.search(window):
                decode = int(told[2])
                self.workers = (int(told[1] or decode), decode)
        self.tokens += found
        self._count(found)
        self.failed = self.failed or _ERROR in window
        if _DONE in window:
            self.complete = True
            self._finish()
        self._tail = window[-_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class LoadClient:
    """Sends streaming completions to one frontend.

    tokens:  that have come so far, over all requests, those still running included

    Args:     named: give each request its id, to find it in the plugin's decisions; Dynamo warns at each.
              ask_workers: have the frontend say which workers it chose; a plugin's are its own instances.
              exact: an answer that does not hold the tokens asked for has failed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        *,
        clock: Clock | None = None,
        timeout_s: float = 60.0,
        named: bool = False,
        ask_workers: bool = False,
        exact: bool = False,
    ) -> None:
        self._host, self._port, self._model = host, port, model
        self._clock: Clock = clock or SystemClock()
        self._timeout_s, self._named, self._exact = timeout_s, named, exact
        self._extra = {"nvext": {"extra_fields": ["worker_id"]}} if ask_workers else {}
        self.tokens = 0

    def encode(self, prompt: Prompt) -> bytes:
        """Return a request's body, to be made ahead of time where the prompt is long."""
        body = {
            "model": self._model,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        return msgspec.json.encode(
            body | self._extra
        )  # a fifth of the time that json takes for a long prompt

    async def complete(self, prompt: Prompt) -> Result:
        """Send one request and wait for its end; never raises for what the server does."""
        result = await self.send(self.encode(prompt))
        if self._exact and result.ok and result.tokens != prompt.max_tokens:
            return replace(result, error=f"{result.tokens} of {prompt.max_tokens} tokens")
        return result

    async def send(self, body: bytes) -> Result:
        """Send one encoded request and wait for its end; never raises for what the server does."""
        request_id = str(uuid.uuid4()) if self._named else ""  # Dynamo takes no other kind
        name = f"x-dynamo-request-id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"{name}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        response = _Response(head.encode() + body, self._clock, done, self._counted)
        started_at_s = self._clock.monotonic_s()
        error = ""
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                transport, _ = await loop.create_connection(lambda: response, self._host, self._port)
                await done
        except TimeoutError:
            error = f"no end within {self._timeout_s:g} s"
        except OSError as refused:
            error = f"connection: {refused}"
        finally:
            if transport is not None:
                transport.close()
        if not error:
            error = _fault(response)
        ended_at_s = self._clock.monotonic_s()
        first = response.first_token_at_s
        return Result(
            started_at_s=started_at_s,
            ttft_s=None if first is None else first - started_at_s,
            latency_s=ended_at_s - started_at_s,
            tokens=response.tokens,
            error=error,
            request_id=request_id,
            workers=response.workers,
        )

    def _counted(self, tokens: int) -> None:
        self.tokens += tokens


def _tokens(data: bytes) -> int:
    return data.count(_TEXT) - data.count(_NO_TEXT)


def _fault(response: _Response) -> str:
    if response.status != b"200":
        return f"HTTP {response.status.decode(errors='replace') or 'nothing'}"
    if response.failed:
        return "error in the stream"
    if not response.complete:
        return "stream cut"
    return "" if response.tokens else "no token"


class ClosedLoop:
    """Users who each send their next request when the last one ended; how many can change at any time."""

    def __init__(
        self, client: LoadClient, source: Iterator[Prompt], report: Callable[[Result], None], clock: Clock
    ) -> None:
        self._client, self._source, self._report, self._clock = client, source, report, clock
        self._wanted = 0
        self._users: dict[int, asyncio.Task[None]] = {}

    def resize(self, concurrency: int) -> None:
        """Have so many users from now on; those who leave finish their request first."""
        self._wanted = concurrency
        for number in range(concurrency):
            user = self._users.get(number)
            if user is None or user.done():
                self._users[number] = asyncio.create_task(self._user(number), name=f"user-{number}")

    async def finish(self) -> None:
        """Send no more and wait for what is in flight."""
        self.resize(0)
        await asyncio.gather(*self._users.values())

    async def _user(self, number: int) -> None:
        while number < self._wanted:
            result = await self._client.complete(next(self._source))
            self._report(result)
            if not result.ok:
                await self._clock.sleep(0.1)  # a dead server is not hammered


def take(source: Iterator[Prompt], count: int) -> list[Prompt]:
    """Return the next `count` prompts."""
    return list(itertools.islice(source, count))
