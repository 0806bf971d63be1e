"""What travels on the event plane: Dynamo's messages and ours, one codec pair.

Owns: the field names, types and units on the wire; turning bytes into values and back.
Does not own: what a message means for a worker's state (fleet.py) or how bytes travel (bus.py).
Invariant: unknown fields are tolerated, known fields are never guessed: a message is decoded whole or
           refused with a reason.
Source: measured on Dynamo 1.4.2; ours carry a version.
"""

from typing import Annotated, Any

import msgspec

from dynamo_poa.errors import WireError
from dynamo_poa.values import Candidate, Mode, Outcome, Role, RouterParams, WorkerCard

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


# Dynamo's part. Everything below is Dynamo's wire format, not ours to change; unknown fields are ignored.

MAX_U64 = 2**64 - 1

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Each rank costs state of its own, so a card may not promise any number of them; engines have tens.
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class _DisaggregatedEndpoint(msgspec.Struct, frozen=True):
    bootstrap_host: str | None = None
    bootstrap_port: _Port | None = None


class _RuntimeConfig(msgspec.Struct, frozen=True):
    total_kv_blocks: _Count | None = None  # per rank
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    data_parallel_size: _Ranks | None = None
    data_parallel_start_rank: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 4097)] | None = None
    disaggregated_endpoint: _DisaggregatedEndpoint | None = None  # only where the KV cache goes by bootstrap


class _ModelCard(msgspec.Struct, frozen=True):
    worker_type: Role
    kv_cache_block_size: _Count  # tokens
    display_name: str = ""
    runtime_config: _RuntimeConfig | None = None


def card_from_mdc(instance_id: int, card: dict[str, Any]) -> WorkerCard:
    """Read a worker's model deployment card, `card_json` of Dynamo's discovery.

    Args:     instance_id: the worker id, unsigned 64-bit.  card: parsed JSON.
    Raises:   WireError with reason `card`, naming the key at fault.
    Source:   host: model card of Dynamo 1.4.2; plugins' own cards leave the capacities null.
    """
    if not 0 <= instance_id <= MAX_U64:
        raise WireError("card", f"instance_id = {instance_id}: must be an unsigned 64-bit number")
    try:
        parsed = msgspec.convert(card, _ModelCard)
    except msgspec.ValidationError as error:
        raise WireError("card", str(error)) from error
    runtime = parsed.runtime_config or _RuntimeConfig()
    endpoint = runtime.disaggregated_endpoint or _DisaggregatedEndpoint()
    return WorkerCard(
        worker_id=instance_id,
        role=parsed.worker_type,
        kv_block_size=parsed.kv_cache_block_size,
        total_kv_blocks=runtime.total_kv_blocks,
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        data_parallel_size=runtime.data_parallel_size or 1,
        data_parallel_start_rank=runtime.data_parallel_start_rank or 0,
        bootstrap_host=endpoint.bootstrap_host,
        bootstrap_port=endpoint.bootstrap_port,
        model_name=parsed.display_name,
    )
