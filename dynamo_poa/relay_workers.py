"""Decides over which connection a request frame goes to its worker, and whether the worker has taken it.

Owns: one kept connection per listener (all workers of a process share one), the order of
      acknowledgements, how many frames may wait for theirs, noticing that a worker's process has gone.
Does not own: what is in a frame (frames.py), the answer, which comes over a connection of the worker's own
      (relay_answers.py), or where a worker listens (dynamo_host.py).
Invariant: the n-th acknowledgement of a connection belongs to its n-th frame, whatever became of its sender;
           a connection that owes an overdue one takes no further frame.
Source: ai-dynamo 1.4.2 on the wire: an acknowledgement is `u32 length | text`, empty when the frame was
        taken, and comes before the worker has even looked into it. Dynamo's own client goes on using a
        connection after a time-out with the order off by one, and takes "Unknown endpoint", which a draining
        worker says, for an acknowledgement; here both are refusals.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, cast

from dynamo_poa.clock import Clock
from dynamo_poa.errors import FrameError, WorkerUnreachable
from dynamo_poa.frames import AckParser
from dynamo_poa.sockets import notice_loss
from dynamo_poa.values import Address

ACK_TIMEOUT_S = 5.0  # Dynamo's own, connecting included
IN_FLIGHT = 1024  # frames of a connection without acknowledgement: Dynamo's own bound
IDLE_S = 60.0
TIDY_S = 5.0

UNREAD_S = 10.0  # a worker always reads: frames are not answers

Frame = bytes | bytearray | memoryview
Listener = tuple[str, int]


class WorkerConnections:
    """The connections to all workers. Enter it, then `deliver`.

    alive:  the workers' addresses now; a connection to none of them is closed as soon as nobody waits on it
    """

    def __init__(
        self,
        clock: Clock,
        *,
        alive: Callable[[], Iterable[Address]] | None = None,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        in_flight: int = IN_FLIGHT,
        idle_s: float = IDLE_S,
    ) -> None:
        self._clock, self._alive = clock, alive
        self._ack_timeout_s, self._in_flight, self._idle_s = ack_timeout_s, in_flight, idle_s
        self._links: dict[Listener, _Link] = {}  # those that take frames
        self._open: set[_Link] = set()  # and those that only wait for something
        self._connecting: dict[Listener, asyncio.Task[_Link]] = {}
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        """Begin to look after idle connections."""
        self._tidying = asyncio.create_task(self._tidy(), name="worker-connections")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections; who still waits for an acknowledgement gets WorkerUnreachable."""
        self._closed = True
        tasks = [*self._connecting.values(), *([self._tidying] if self._tidying else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = list(self._open)
        for link in links:
            link.leave()
        await asyncio.gather(*(link.gone for link in links))

    @property
    def task(self) -> "asyncio.Task[None] | None":
        """Return what looks after idle connections; it ends only by failing."""
        return self._tidying

    @property
    def open(self) -> int:
        """Return how many connections there are."""
        return len(self._open)

    async def deliver(self, address: Address, frame: Frame) -> "asyncio.Future[WorkerUnreachable]":
        """Send a frame and wait until the worker has taken it.

        Cancelled after it was written, the frame is with the worker all the same, which will dial back.

        Args:     frame: whole, with the worker's own path in it; not to be changed afterwards.
        Returns:  what ends with the error once the worker's connection is lost, which is how a process that
                  dies is noticed before its answer begins. Cancel it when the worker has dialled back: until
                  then it keeps the connection open.
        Raises:   WorkerUnreachable when the worker refused it, could not be reached, or is silent.
        """
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                listener = (address.host, address.port)
                link = self._links.get(listener) or await self._connect(listener)
                refusal = await link.send(frame)
        except TimeoutError:
            what = "connection" if link is None else "acknowledgement"
            if link is not None:
                self._retire(link)
            detail = f"no {what} within {self._ack_timeout_s:g} s"
            raise WorkerUnreachable(address.worker_id, detail) from None
        except OSError as error:
            raise WorkerUnreachable(address.worker_id, str(error)) from error
        if refusal:
            raise WorkerUnreachable(address.worker_id, refusal)
        return link.watch(address.worker_id)

    async def _connect(self, listener: Listener) -> "_Link":
        """Open a connection, or wait for the one that is being opened."""
        if self._closed:
            raise ConnectionAbortedError("the relay is closing")
        task = self._connecting.get(listener)
        if task is None:
            task = asyncio.create_task(self._open_link(listener), name=f"connect {listener}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._connecting[listener] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed:  # the task was cancelled, not its caller
                raise ConnectionAbortedError("the relay is closing") from None
            raise

    async def _open_link(self, listener: Listener) -> "_Link":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                _, link = await loop.create_connection(
                    lambda: _Link(listener, self._in_flight, self._clock, self._forget), *listener
                )
        finally:
            del self._connecting[listener]
        if not link.gone.done():  # or it came and went in the same moment
            self._open.add(link)
        if link.lost is None:
            self._links[listener] = link
        return link

    def _forget(self, link: "_Link") -> None:
        """Take note that a connection has ended."""
        self._open.discard(link)
        if self._links.get(link.listener) is link:
            del self._links[link.listener]

    def _retire(self, link: "_Link") -> None:
        """Send nothing more over a connection, and end it when nobody waits on it."""
        if self._links.get(link.listener) is link:
            del self._links[link.listener]
        link.retire()

    async def _tidy(self) -> None:
        while True:
            await self._clock.sleep(TIDY_S)
            now_s = self._clock.monotonic_s()
            alive = None if self._alive is None else {(at.host, at.port) for at in self._alive()}
            for link in list(self._open):
                left = alive is not None and link.listener not in alive
                idle = not link.waited_on and now_s - link.used_at_s >= self._idle_s
                if left or idle or link.retired:  # those retired before, again: who waited may have given up
                    self._retire(link)


class _Link(asyncio.Protocol):
    """One connection to a listener of workers."""

    def __init__(
        self, listener: Listener, in_flight: int, clock: Clock, forget: Callable[["_Link"], None]
    ) -> None:
        self.listener = listener
        self.lost: str | None = None  # why, once it is
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.used_at_s = clock.monotonic_s()
        self._clock, self._in_flight, self._forget = clock, in_flight, forget
        self._transport: asyncio.Transport | None = None
        self._acks: deque[asyncio.Future[str]] = deque()  # oldest first; who gave up keeps his place
        self._watchers: dict[asyncio.Future[WorkerUnreachable], int] = {}
        self._parser = AckParser()
        self._paused = self.retired = False
        self._room = asyncio.Event()

    @property
    def waited_on(self) -> bool:
        """Tell whether somebody waits for an acknowledgement or wants to know of its end."""
        return bool(self._watchers) or any(not ack.done() for ack in self._acks)

    async def send(self, frame: Frame) -> str:
        """Write a frame and return its acknowledgement's text.

        Raises:  OSError when the connection is lost before that.
        """
        while not self._room.is_set():
            await self._room.wait()
        if self.lost is not None or self._transport is None:
            raise ConnectionResetError(self.lost)
        ack: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._acks.append(ack)
        self.used_at_s = self._clock.monotonic_s()
        self._transport.write(frame)
        self._see_room()
        return await ack

    def watch(self, worker_id: int) -> "asyncio.Future[WorkerUnreachable]":
        """Return what ends when the connection is lost."""
        watcher: asyncio.Future[WorkerUnreachable] = asyncio.get_running_loop().create_future()
        if self.lost is not None:  # in the moment between the acknowledgement and this
            watcher.set_result(WorkerUnreachable(worker_id, self.lost))
            return watcher
        self._watchers[watcher] = worker_id
        watcher.add_done_callback(self._unwatch)
        return watcher

    def retire(self) -> None:
        """Close when nobody waits any more."""
        self.retired = True
        self._close_if_done()

    def leave(self) -> None:
        """Close at once: not a loss to those who watch."""
        for watcher in list(self._watchers):
            watcher.cancel()
        self._watchers.clear()
        self._fail("the relay is closing")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        notice_loss(transport, UNREAD_S)
        self._see_room()

    def data_received(self, data: bytes) -> None:
        """Give acknowledgements to those they belong to, in order."""
        try:
            self._parser.feed(data)
            while (text := self._parser.next()) is not None:
                if not self._acks:
                    return self._fail("an acknowledgement of nothing")
                ack = self._acks.popleft()
                if not ack.done():
                    ack.set_result(text)
        except FrameError as error:
            return self._fail(str(error))
        self._see_room()
        self._close_if_done()
        return None

    def pause_writing(self) -> None:
        """Hold frames back: the worker does not read."""
        self._paused = True
        self._see_room()

    def resume_writing(self) -> None:
        """Go on writing."""
        self._paused = False
        self._see_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody who waits."""
        if self.lost is None:
            self.lost = f"connection lost: {exc or 'closed by the worker'}"
        self._forget(self)
        self._see_room()
        while self._acks:
            ack = self._acks.popleft()
            if not ack.done():
                ack.set_exception(ConnectionResetError(self.lost))
        for watcher, worker_id in list(self._watchers.items()):
            if not watcher.done():
                watcher.set_result(WorkerUnreachable(worker_id, self.lost))
        self._watchers.clear()
        if not self.gone.done():
            self.gone.set_result(None)

    def _see_room(self) -> None:
        if self.lost is not None or (not self._paused and len(self._acks) < self._in_flight):
            self._room.set()
        else:
            self._room.clear()

    def _unwatch(self, watcher: "asyncio.Future[WorkerUnreachable]") -> None:
        self._watchers.pop(watcher, None)
        self.used_at_s = self._clock.monotonic_s()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self.retired or self.waited_on or self._transport is None:
            return
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # `close` would wait for a worker that does not read, for ever
        else:
            self._transport.close()

    def _fail(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        self._see_room()
        if self._transport is not None:
            self._transport.abort()
