"""What travels on the event plane: Dynamo's messages and ours, one codec pair.

Owns: the field names, types and units on the wire; turning bytes into values and back.
Does not own: what a message means for a worker's state (fleet.py) or how bytes travel (bus.py).
Invariant: unknown fields are tolerated, known fields are never guessed: a message is decoded whole or
           refused with a reason.
Source: measured on Dynamo 1.4.2; ours carry a version.
"""

import msgspec

from dynamo_poa.values import Candidate, Mode, Outcome, Role, RouterParams

VERSION = 1


def subject(namespace: str, topic: str) -> str:
    """Return our subject for a topic: `decisions`, `params`, `telemetry`, `control` or `handover`."""
    return f"poa.{namespace}.{topic}"


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag="chosen"):
    """A worker was chosen. Instants are seconds since the epoch on the router's clock."""

    request_id: str  # the same on both legs
    role: Role
    at_s: float
    received_at_s: float  # when this leg of the request reached the router
    worker_id: int
    dp_rank: int
    prompt_tokens: int
    revision: int  # of the parameters the choice was made under
    attempt: int  # 1, or 2 after a refused connection
    candidates: tuple[Candidate, ...]


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first_token"):
    """The first chunk of a leg reached the router."""

    request_id: str
    role: Role
    at_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A leg is over, however it ended."""

    request_id: str
    role: Role
    at_s: float
    outcome: Outcome


DecisionEvent = Chosen | FirstToken | Ended


class DecisionBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Router to controller, on `poa.<namespace>.decisions`; sent at least once a second, also when empty.

    dropped:         events this router has dropped since it started, because its queue was full
    in_flight:       requests by role that this router is serving now
    params_source:   `static`, `heartbeat` or `store`
    loop_lag_s:      worst delay of the router's event loop since the batch before
    """

    version: int = VERSION
    router_id: str
    sequence: int
    sent_at_s: float
    events: tuple[DecisionEvent, ...] = ()
    dropped: int = 0
    in_flight: dict[str, int] = {}
    params_revision: int = 0
    params_source: str = "static"
    loop_lag_s: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to routers, on `poa.<namespace>.params`: the current record, once a second and on change."""

    version: int = VERSION
    controller_id: str
    sent_at_s: float
    mode: Mode
    params: RouterParams


class Handover(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Router to routers, on `poa.<namespace>.handover`: where the prefill leg of a request went."""

    request_id: str
    worker_id: int
    dp_rank: int
    bootstrap_host: str
    bootstrap_port: int
