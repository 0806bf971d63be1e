"""Which requests are in flight, on which leg and worker, and in which phase.

Owns: joining a request's legs by (request id, leg); when a request is given up; what the estimator prices:
      each leg's requests with the worker they are on.
Does not own: the wire (wire.py), windows of decisions and TTFT (decisions.py), prices (snapshot.py).
Invariant: bounded whatever routers send; instants of phases are those of local receipt, never a sender's.
Source: contract Decision of the architecture; theory.md, snapshots.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamo_poa import wire
from dynamo_poa.values import Outcome, Role, WorkerKey


class Uncached(NamedTuple):
    """What a prompt would cost each worker; requests with the same candidates share one tuple of workers.

    tokens:  `(m,)` prompt tokens to be computed, in the order of `workers`
    """

    workers: tuple[WorkerKey, ...]
    tokens: NDArray[np.float64]


class InFlight(NamedTuple):
    """One leg of one request that is running.

    cached_tokens:     of the prompt, on its own worker
    uncached:          as recorded at the decision; None where it was not
    since_s:           when the choice was heard of
    decoding_since_s:  when its prompt was done; None before. A decode leg whose prefill leg was never seen
                       decodes from the start.
    """

    request_id: str
    worker: WorkerKey
    prompt_tokens: int
    cached_tokens: int
    uncached: Uncached | None
    since_s: float
    decoding_since_s: float | None


class _Leg:
    __slots__ = (
        "at_s",
        "cached_tokens",
        "first_token_at_s",
        "prompt_tokens",
        "router_id",
        "uncached",
        "worker",
    )

    def __init__(self, event: wire.Chosen, router_id: str, at_s: float, uncached: Uncached | None) -> None:
        self.router_id = router_id
        self.worker = WorkerKey(event.worker_id, event.dp_rank)
        self.prompt_tokens = event.prompt_tokens
        self.cached_tokens = event.cached_tokens
        self.uncached = uncached
        self.at_s = at_s
        self.first_token_at_s: float | None = None


class Request:
    """One request over its legs.

    received_at_s:   when its earliest known leg reached a router, on the router's clock
    decided_at_s:    when its first decision was heard of
    revision:        of the parameters that one was made under
    ttft_s:          receipt to the answering leg's first token; None before it, and when it is impossible
    told:            how it fared was told
    prefilled_at_s:  when its prefill leg gave its first token; None before, and where there is no such leg
    refused:         by Dynamo, on one leg
    """

    __slots__ = (
        "answered",
        "decided_at_s",
        "has_prefill",
        "legs",
        "prefilled_at_s",
        "received_at_s",
        "refused",
        "revision",
        "told",
        "ttft_s",
    )

    def __init__(self, received_at_s: float, decided_at_s: float, revision: int) -> None:
        self.received_at_s = received_at_s
        self.decided_at_s = decided_at_s
        self.revision = revision
        self.ttft_s: float | None = None
        self.told = False
        self.legs: dict[Role, _Leg] = {}
        self.answered = False
        self.has_prefill = False
        self.prefilled_at_s: float | None = None
        self.refused = False


class Flight:
    """The requests whose end has not been heard of.

    forgotten:  requests given up because too many were open
    """

    def __init__(self, answering: frozenset[Role], max_requests: int) -> None:
        self.forgotten = 0
        self._answering = answering
        self._max_requests = max_requests
        self._requests: dict[str, Request] = {}
        self._running: dict[tuple[str, Role], set[str]] = {}  # request ids by router and leg
        # between legs, or answered with one still running; oldest first
        self._lingering: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        """Return a request that is known, None otherwise."""
        return self._requests.get(request_id)

    @property
    def waiting(self) -> int:
        """Return how many requests have a caller that still waits."""
        return len(self._requests) - len(self._lingering)

    def running(self, role: Role) -> list[InFlight]:
        """Return a leg's requests, in the order their requests were first heard of."""
        found = []
        for request_id, request in self._requests.items():
            leg = request.legs.get(role)
            if leg is None:
                continue
            found.append(
                InFlight(
                    request_id,
                    leg.worker,
                    leg.prompt_tokens,
                    leg.cached_tokens,
                    leg.uncached,
                    leg.at_s,
                    _decoding_since_s(request, leg, role),
                )
            )
        return found

    def chosen(self, event: wire.Chosen, router_id: str, at_s: float, uncached: Uncached | None) -> bool:
        """Take in a decision; tell whether its request is a new one."""
        request = self._requests.get(event.request_id)
        is_new = request is None
        if request is None:
            if len(self._requests) >= self._max_requests:
                self._forget(next(iter(self._requests)))
                self.forgotten += 1
            request = self._requests[event.request_id] = Request(event.received_at_s, at_s, event.revision)
        request.received_at_s = min(request.received_at_s, event.received_at_s)
        request.has_prefill |= event.role is Role.PREFILL
        self._end_leg(event.request_id, request, event.role)  # of an attempt before this one
        request.legs[event.role] = _Leg(event, router_id, at_s, uncached)
        self._running.setdefault((router_id, event.role), set()).add(event.request_id)
        self._lingering.pop(event.request_id, None)
        return is_new

    def first_token(self, event: wire.FirstToken, at_s: float) -> Request | None:
        """Note a leg's first token; return its request, None when unknown."""
        request = self._requests.get(event.request_id)
        if request is None:
            return None
        leg = request.legs.get(event.role)
        if leg is not None and leg.first_token_at_s is None:
            leg.first_token_at_s = at_s
        if event.role is Role.PREFILL and request.prefilled_at_s is None:
            request.prefilled_at_s = at_s
        return request

    def ended(self, event: wire.Ended, at_s: float) -> bool:
        """Note the end of a leg; tell whether its request was refused by it, and not with another leg before.

        The decode leg of a refused prefill leg comes all the same, and ends as refused, too.
        """
        request = self._requests.get(event.request_id)
        refused = event.outcome is Outcome.SHED
        if request is None:
            if refused and event.role not in self._answering and len(self._requests) < self._max_requests:
                request = self._requests[event.request_id] = Request(event.at_s, at_s, 0)
                request.refused = True
                self._lingering[event.request_id] = at_s
            return refused
        first = refused and not request.refused
        request.refused |= refused
        self._end_leg(event.request_id, request, event.role)
        if request.legs:
            if event.role in self._answering:
                # Measured: a prefill leg may outlive its request; the caller does not wait for it.
                self._lingering[event.request_id] = at_s
        elif (
            event.role in self._answering
            or request.answered
            or event.outcome not in (Outcome.OK, Outcome.SHED)
        ):
            self._forget(event.request_id)
        else:
            self._lingering[event.request_id] = at_s
        return first

    def end_legs(self, router_id: str, role: Role) -> None:
        """End all of a router's legs of one role: it is gone, or says that it has none."""
        for request_id in self._running.pop((router_id, role), ()):
            request = self._requests[request_id]
            del request.legs[role]
            if not request.legs:
                self._forget(request_id)

    def give_up(self, lingering_since_s: float) -> None:
        """Forget requests that have lingered since before an instant."""
        while self._lingering:
            request_id, since_s = next(iter(self._lingering.items()))
            if since_s >= lingering_since_s:
                break
            self._forget(request_id)

    def _end_leg(self, request_id: str, request: Request, role: Role) -> None:
        leg = request.legs.pop(role, None)
        if leg is not None:
            self._running[leg.router_id, role].discard(request_id)

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        self._lingering.pop(request_id, None)
        if request is not None:
            for role in list(request.legs):
                self._end_leg(request_id, request, role)


def _decoding_since_s(request: Request, leg: _Leg, role: Role) -> float | None:
    """Return since when a leg's prompt has been done.

    With bootstrap hand-over both legs are chosen at once, and the decode worker waits for the prefill one.
    """
    if role is not Role.DECODE or leg.first_token_at_s is not None:
        return leg.first_token_at_s
    if not request.has_prefill:
        return leg.at_s
    return None if request.prefilled_at_s is None else max(request.prefilled_at_s, leg.at_s)
