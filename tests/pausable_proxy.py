"""A loopback TCP proxy that can be paused: connections stay open and nothing passes."""

import asyncio
from types import TracebackType
from typing import Self


class PausableProxy:
    """Forwards to a port of this machine; enter it, then use `url`."""

    def __init__(self, target_port: int) -> None:
        self.url = ""
        self._target_port = target_port
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        # A small receive buffer, so that a paused connection fills up within kilobytes.
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1024)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Return how many are open."""
        return len(self._tasks)

    def pause(self) -> None:
        """Let nothing through any more, not even on new connections."""
        self._passing.clear()

    def resume(self) -> None:
        """Let everything through again, what was held back first."""
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, to_writer))
                    both.create_task(self._forward(to_reader, writer))
            finally:
                to_writer.transport.abort()
        except (OSError, ExceptionGroup):
            pass  # one side went away
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
