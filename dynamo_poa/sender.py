"""When a router's queued messages are sent: beside the request path, and what is left of them at the end.

Owns: the one task that sends, and that it ends with its queue.
Does not own: what waits, its order and its bounds (reporter.py, booking.py), the transport (bus.py).
Invariant: the task ends only by failing or by being left, so whoever watches it knows that nothing is sent.
"""

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Protocol, Self


class Publisher(Protocol):
    """The part of the bus that is needed here."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send, or raise BusError."""
        ...


class Sender(ABC):
    """A queue that sends while it is entered."""

    TASK: ClassVar[str]  # its task's name, for whoever debugs
    _task: "asyncio.Task[None] | None" = None

    @property
    def task(self) -> "asyncio.Task[None] | None":
        """Return what sends; it ends only by failing."""
        return self._task

    async def __aenter__(self) -> Self:
        """Start sending."""
        self._task = asyncio.create_task(self._send_on(), name=self.TASK)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left, then stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send_all()

    @abstractmethod
    async def _send_on(self) -> None:
        """Send what comes, until cancelled."""

    @abstractmethod
    async def _send_all(self) -> object:
        """Send what waits now."""
