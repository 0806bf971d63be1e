"""Decides the life of one process: started, its output passed on, started again when it ends unasked.

Owns: one child process in a session of its own, its output, its restarts and their back-off, its end.
Does not own: the order of processes, or whether one is ready (supervisor.py).
Invariant: when `keep` has returned, nothing of the process's session is left; a child dies with its
           supervisor, however that dies.
Source: Linux prctl(2), PR_SET_PDEATHSIG.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.errors import StartError
from dynamo_poa.serve.graph import Process

Emit = Callable[[str, str], None]

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 10.0
STEADY_S = 30.0  # a process up for so long has recovered: back-off begins anew
EARLY_CRASHES = 3  # so many are forgiven before a process is ready
LAST_LINES = 20
MAX_LINE_BYTES = 65_536  # longer lines are passed on in pieces, so that no output fills memory

# Runs in the child before the program: a thread-safe place to ask for its death, unlike `preexec_fn`.
_BOUND_TO_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
)

log = structlog.get_logger()


async def _nothing(spec: Process) -> None:
    """Do nothing."""


class Child:
    """One process of a graph, kept running until told to stop.

    ended:  is called each time it has ended unasked, before it is started again
    """

    def __init__(
        self,
        spec: Process,
        env: Mapping[str, str],
        emit: Emit,
        clock: Clock,
        ended: Callable[[Process], Awaitable[None]] = _nothing,
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready = False  # set by the supervisor; crashes before count towards giving up
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._env, self._emit, self._clock, self._ended = env, emit, clock, ended
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Return the process id, None while it is down."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and running else None

    async def keep(self) -> None:
        """Run the process again and again until told to stop.

        Raises:  StartError when it crashes too often before it is ready.
        """
        backoff_s, early_crashes = FIRST_BACKOFF_S, 0
        while True:
            started_at_s = self._clock.monotonic_s()
            status = await self._run_once()
            if self._stopping:
                return
            up_s = self._clock.monotonic_s() - started_at_s
            await self._ended(self.spec)
            if not self.ready:
                early_crashes += 1
                if early_crashes > EARLY_CRASHES:
                    raise StartError(self._obituary(early_crashes, status))
            if up_s >= STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            self.restarts += 1
            log.warning(
                "poa.process.restarted",
                process=self.spec.name,
                status=status,
                up_s=round(up_s, 3),
                backoff_s=backoff_s,
                restarts=self.restarts,
            )
            await self._clock.sleep(backoff_s)
            if self._stopping:
                return
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def stop(self) -> None:
        """Ask the process to end and do not start it again."""
        self._stopping = True
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Signal the process alone, if it is running."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the whole session at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> int:
        """Run to the end and return the exit status, negative for a signal."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        read_end, write_end = os.pipe()
        # A pipe of our own: asyncio's would keep `wait` from returning while a grandchild holds it open.
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        pump = loop.create_task(self._pump(reader), name=f"output of {self.spec.name}")
        try:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())),
                    *self.spec.argv,
                    env={**os.environ, **self._env, **self.spec.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
            if self._stopping:
                self.send(signal.SIGTERM)
            return await self._process.wait()
        finally:
            self.kill()  # whatever the process itself has started
            await asyncio.wait([pump], timeout=1.0)
            pump.cancel()
            transport.close()

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await reader.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._pass_on(line)
            if len(rest) >= MAX_LINE_BYTES:
                self._pass_on(rest)
                rest = b""
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._emit(self.spec.name, text)

    def _obituary(self, crashes: int, status: int) -> str:
        said = "".join(f"\n  {line}" for line in self.last_lines) or " nothing"
        return (
            f"{self.spec.name} ended {crashes} times before it was ready, last with status {status}; "
            f"it said:{said}"
        )
