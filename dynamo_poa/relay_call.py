"""Which worker's bytes become a requester's answer, when a try is given up, and how the call ends.

Owns: one request's call (router.Call): its tries at workers, the join of one of them with the requester, who
      left and what that ends, the error that stands in for an answer.
Does not own: which worker is asked (trip.py), how a request reaches it (relay_workers.py), sockets
      (relay_answers.py), what bytes mean (frames.py, answers.py).
Invariant: a requester gets handshake and prologue once and at once, so that it can cancel from then on; after
           that only bytes of one attempt, unchanged. A call that is over leaves no connection behind.
Source: ai-dynamo 1.4.2 on the wire (frames.py). A requester closes its half only when it wants no more: after
        `kill`, after the end, or because its process has gone (host: network/tcp/server.rs).
"""

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_poa.answers import AnswerWatch
from dynamo_poa.errors import AnswerFailed, PoaError, WorkerUnreachable
from dynamo_poa.frames import Request, error_answer, handshake, prologue, split_address
from dynamo_poa.handover import of_the_other_leg
from dynamo_poa.relay_answers import HIGH_WATER_BYTES, Answers, RequesterSide, WorkerSide
from dynamo_poa.values import Address, Outcome, WorkerKey

CUT_OFF = "the worker's connection ended before its answer did"
CONNECT_S = 5.0  # to a requester, who listens before it asks

CHANGED = ("routing", "bootstrap_info")
READ = ("token_ids", "router_config_override", "stop_conditions", *CHANGED)
UUID_CHARS, KEPT_CHARS = 36, 24

Deliver = Callable[[Address, bytes], Awaitable["asyncio.Future[WorkerUnreachable]"]]
Locate = Callable[[int], Address | None]


def engine_id(request_id: str, bootstrap_info: Mapping[str, Any] | None, subject: str) -> str:
    """Return what an engine is to call one try at a request: the same on both legs, another for each try.

    The frontend sends a request again under its old id when its router has died. A worker that still clears
    up after the first would end the second with it. Engines that hand over want one id of both legs, of which
    one may come by stream, under the frontend's: so there only what has lived before is renamed. The id's
    first half stays, to be found in logs by.

    Args:     bootstrap_info: where and under which room the legs of this try meet, the same on both.
              subject: the attempt's own, where nobody else need know.
    Source:   measured, mock engine, make soak: answers cut short after a router was killed.
    """
    if len(request_id) != UUID_CHARS:
        return request_id
    if not bootstrap_info:
        return request_id[:KEPT_CHARS] + subject[KEPT_CHARS:]
    room, handoff = bootstrap_info.get("bootstrap_room"), bootstrap_info.get("handoff_id")
    place = f"{room} {bytes(handoff or ()).hex()}".encode()
    return request_id[:KEPT_CHARS] + hashlib.blake2b(place, digest_size=6).hexdigest()


class RelayCall:
    """One request that came over the relay: router.Call."""

    def __init__(self, request: Request, answers: Answers, deliver: Deliver, locate: Locate) -> None:
        self.answers, self._deliver, self._locate = answers, deliver, locate
        self._request: Request | None = request  # until its answer has begun: it may be megabytes
        self._id, self._back = request.id, request.address
        self._stopped = False
        self._attempt: Attempt | None = None
        self._give_up: Callable[[], object] = lambda: None
        self.moved: Callable[[], object] = lambda: None
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._requester = RequesterSide(self, answers, handshake(request.subject) + prologue())

    def id(self) -> str:
        """Return the request's id, the same on both legs."""
        return self._id

    def body(self) -> dict[str, Any]:
        """Return the fields of the request that routing reads or changes.

        Raises:   FrameError.
        """
        assert self._request is not None
        fields = {name: self._request.get(name) for name in READ}
        return {name: value for name, value in fields.items() if value is not None}

    def on_given_up(self, give_up: Callable[[], object]) -> None:
        """Call this when nobody wants the answer any more, and it has not begun."""
        self._give_up = give_up

    def tell(self, moved: Callable[[], object]) -> None:
        """Call this from now on whenever something comes from the worker."""
        self.moved = moved

    async def open(self) -> None:
        """Reach the requester; one that cannot be reached has gone, and the call is stopped."""
        host, port = split_address(self._back)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self._requester, host, port)
        except OSError as error:  # TimeoutError is one
            self.answers.complaints.say(
                "poa.relay.requester_unreachable", address=self._back, error=str(error) or "no answer"
            )
            self.requester_left()

    @property
    def requester_waits(self) -> bool:
        """Tell whether the requester cannot take more bytes now."""
        return self._requester.waits

    def is_stopped(self) -> bool:
        """Tell whether the requester has gone or wants no more."""
        return self._stopped

    def stop_generating(self) -> None:
        """Ask the worker to end; its answer then stays incomplete."""
        self._cancel()
        if self._attempt is not None:
            self._attempt.leave()

    async def send(
        self, request: dict[str, Any], worker: WorkerKey, *, again: bool = False, renamed: bool = False
    ) -> bool:
        """Send and wait for the first bytes of the answer.

        Args:     again: an error instead of a first token is raised, not passed on: it may be tried again.
                  renamed: the engine is to know the request by an id of its own (`engine_id`).
        Returns:  whether they are a first token, not an error.
        Raises:   WorkerUnreachable, also when the requester has gone meanwhile: then `is_stopped`.
                  AnswerFailed when the other leg's worker is what failed, or, with `again`, for any error
                  instead of a first token.
                  PoaError when a worker's answer has begun already: there cannot be another.
        """
        if self._request is None:
            raise PoaError(f"request {self._id}: another worker's answer has begun")
        if self._stopped:
            raise WorkerUnreachable(worker.worker_id, "the requester has gone")
        address = self._locate(worker.worker_id)
        if address is None:
            raise WorkerUnreachable(worker.worker_id, "it has left discovery")
        attempt = self._attempt = Attempt(self, worker, again=again)
        routing = request.get("routing") or {}
        changes = {name: request[name] for name in CHANGED if name in request}
        changes["routing"] = {**routing, "dp_rank": worker.dp_rank}
        place = request.get("bootstrap_info")
        name = engine_id(self._id, place, attempt.subject) if renamed else None
        frame = self._request.sent_to(
            address.path, self.answers.address, changes, subject=attempt.subject, name=name
        )
        self.answers.expect(attempt)
        try:
            return await attempt.begun(await self._deliver(address, frame))
        except (WorkerUnreachable, AnswerFailed, asyncio.CancelledError):
            attempt.leave()
            raise

    async def ended(self) -> Outcome:
        """Wait for the end of the answer and tell how it went."""
        return await self._ended

    def over(self, error: str | None = None) -> None:
        """Let go of everything: nobody serves this call any more.

        Args:     error: is told as Dynamo tells of a handler that failed; an answer that has begun is cut
                  off, as by a worker that dies, for its last frame may be incomplete.
        """
        attempt, begun = self._attempt, self._request is None
        if begun and attempt is not None and attempt.watch.final:
            return  # its requester closes, or is made to
        if self._stopped:
            self._requester.linger()  # it has been told nothing yet: natively a worker waits for its close
        elif error is not None and not begun:
            self._requester.write(error_answer(error))
            self._requester.linger()
        else:
            self._requester.close()
        self._end(Outcome.FAILED)
        if attempt is not None and not (begun and self._stopped):
            attempt.leave()

    # What the two sides report.

    def begun(self) -> None:
        """Take note that there will be no other attempt."""
        self._request = None

    def pass_on(self, data: bytes) -> None:
        """Hand the worker's bytes to the requester."""
        self._requester.write(data)

    def answer_complete(self, outcome: Outcome) -> None:
        """Take note of the final frame; the requester closes once it has it."""
        self._end(outcome)
        self._requester.linger()

    def worker_left(self, watch: AnswerWatch) -> None:
        """Take note that no more bytes will come, and tell the requester so, behind those that have.

        A requester takes an answer that is cut off for the end of this router, and sends it nothing for a
        while: measured, one dead worker of three behind two routers, and 45 other requests were refused. So
        it gets an error, as on the stream path, unless it has part of a frame.
        """
        if not watch.final:
            self._end(Outcome.FAILED)
            if watch.between_frames:
                self._requester.write(error_answer(CUT_OFF))
                self._requester.linger()
                return
        self._requester.close()

    def asked(self, data: bytes) -> None:
        """Hand the requester's bytes, `stop` or `kill`, to the worker; it says nothing else."""
        if self._attempt is not None:
            self._attempt.pass_back(data)
        self._cancel()

    def requester_left(self) -> None:
        """End what the worker does for a requester that has gone."""
        self._cancel()
        if self._attempt is not None:
            self._attempt.leave()

    def hold(self, paused: bool) -> None:
        """Let the worker's side wait while the requester does not read."""
        if self._attempt is not None:
            self._attempt.hold(paused)

    def _cancel(self) -> None:
        if self._ended.done():
            return
        self._stopped = True
        self._end(Outcome.CANCELLED)
        if self._request is not None:
            self._give_up()

    def _end(self, outcome: Outcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)


class Attempt:
    """One worker's try at a call."""

    def __init__(self, call: RelayCall, worker: WorkerKey, *, again: bool = False) -> None:
        self.subject = str(uuid.uuid4())  # of its own: a worker given up may still dial back
        self.watch = AnswerWatch()
        self._call, self._worker, self._again = call, worker, again
        loop = asyncio.get_running_loop()
        self._dialled: asyncio.Future[None] = loop.create_future()
        self._first: asyncio.Future[bool] = loop.create_future()
        self._side: WorkerSide | None = None
        self._given_up = False
        self._head = b""

    async def begun(self, lost: "asyncio.Future[WorkerUnreachable]") -> bool:
        """Wait for the first data; `lost` ends when the worker's process has gone."""
        limit_s = self._call.answers.dial_back_s
        try:
            started: set[asyncio.Future[Any]] = {lost, self._dialled, self._first}
            await asyncio.wait(started, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._dialled.done() and not self._first.done():
                if lost.done():
                    raise lost.result()
                self._call.answers.waited_in_vain()
                raise self._unreachable(f"no answer begun within {limit_s:g} s of its acknowledgement")
        finally:
            lost.cancel()
        return await self._first

    def leave(self) -> None:
        """Have nothing more to do with the worker, which stops: it is told so, now or when it dials back."""
        if self._given_up:
            return
        self._given_up = True
        self._call.answers.forget(self)
        if self._side is not None:
            self._side.dismiss(kill=not self.watch.final)
        self._fail("given up")

    def pass_back(self, data: bytes) -> None:
        """Hand the requester's bytes to the worker."""
        if self._side is not None:
            self._side.write(data)

    def hold(self, paused: bool) -> None:
        """Read no more of the answer, or go on."""
        if self._side is not None:
            self._side.hold(paused)

    def dialled(self, side: WorkerSide) -> None:
        """Take the worker's connection."""
        self._side = side
        side.hold(self._call.requester_waits)
        self._dialled.set_result(None)

    def refused(self, error: str) -> None:
        """Take note of an error instead of an answer: the worker could not begin."""
        self._fail(error, AnswerFailed if of_the_other_leg(error) else WorkerUnreachable)

    def data(self, data: bytes) -> None:
        """Take bytes of the answer."""
        self._call.moved()
        watch = self.watch
        watch.feed(data)
        if not self._first.done():
            if not watch.data_frames and not watch.final and len(self._head) < HIGH_WATER_BYTES:
                self._head += data  # of a frame's beginning: another attempt may still follow this one
                return
            nothing = watch.final and not watch.data_frames
            token = not nothing and (watch.data_frames > 1 or not watch.failing)
            if self._again and not token:
                self._fail(watch.reported or "an answer without a token", AnswerFailed)
                self.leave()  # at once: what follows must not be passed on
                return
            data, self._head = self._head + data, b""
            self._call.begun()
            self._first.set_result(token)
        self._call.pass_on(data)
        if watch.final:
            self._call.answer_complete(Outcome.OK if watch.complete else Outcome.FAILED)

    def lost(self) -> None:
        """Take note that the worker's connection has ended."""
        if self._given_up:
            return
        if self._first.done() and not self._first.exception():
            self._call.worker_left(self.watch)
        else:
            self._fail("the connection ended before the first token")

    def _fail(
        self, detail: str, kind: type[WorkerUnreachable] | type[AnswerFailed] = WorkerUnreachable
    ) -> None:
        if not self._first.done():
            self._first.set_exception(kind(self._worker.worker_id, detail))
            self._first.exception()  # who waits sees it; nobody need

    def _unreachable(self, detail: str) -> WorkerUnreachable:
        return WorkerUnreachable(self._worker.worker_id, detail)
