"""What must be known of a recording before it is replayed: its workers, their namespaces, the answering leg.

Owns: a first reading of the file; which workers there were when nobody announced their cards.
Does not own: the file format (recording.py), the replay (playback.py).
Invariant: announced cards are believed, and only without any are workers inferred, which is told.
Source: measured on Dynamo 1.4.2: prefill workers serve the component `prefill`, decode and aggregated ones
        `backend`; an idle worker still reports a forward pass a second.
"""

from collections import Counter
from pathlib import Path

import msgspec

from dynamo_poa import wire
from dynamo_poa.errors import RecordingError, WireError
from dynamo_poa.recording import Reader
from dynamo_poa.values import Role, WorkerCard

OURS = ("decisions", "params", "cards", "telemetry")
PREFILL_COMPONENT = "prefill"
_ANSWERING = frozenset({Role.DECODE, Role.AGGREGATED})

_decode_batch = msgspec.msgpack.Decoder(wire.DecisionBatch).decode


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a first reading has found.

    answering:   legs whose first token is the request's: prefill's only where routers see no other leg
    namespaces:  of workers: two, where the frontend sees some of them directly
    cards:       as first announced, or inferred from forward passes, whose capacities are unknown
    """

    answering: frozenset[Role]
    namespaces: tuple[str, ...]
    cards: tuple[WorkerCard, ...]
    inferred: bool


def survey(path: Path, block_size: int) -> Survey:
    """Read a recording for the first time.

    Args:     block_size: of inferred workers, tokens.
    Raises:   RecordingError when the file is not a recording.
    """
    if path.exists() and not path.is_file():
        raise RecordingError(f"{path}: must be a file: it is read twice")
    announced: tuple[WorkerCard, ...] = ()
    answering = frozenset({Role.PREFILL})
    ranks: dict[tuple[str, int], int] = {}  # the highest of each component's worker
    heard = Counter[str]()
    for line in Reader(path):
        route = route_of(line.subject)
        if route is None:
            continue
        topic = route.topic
        heard[route.namespace] += topic not in OURS
        try:
            if topic == "cards":
                announced = announced or wire.decode_cards(line.data).cards
            elif topic == "decisions" and answering != _ANSWERING:
                if any(event.role in _ANSWERING for event in _decode_batch(line.data).events):
                    answering = _ANSWERING
            elif topic == wire.FORWARD_PASS_METRICS and not announced:
                message = wire.decode_dynamo(line.subject, line.data)
                assert isinstance(message.body, wire.ForwardPass)
                worker = route.component, message.body.worker_id
                ranks[worker] = max(ranks.get(worker, 0), message.body.dp_rank)
        except (WireError, msgspec.DecodeError, RecursionError):
            continue  # counted and named by the replay
    return Survey(
        answering=answering,
        namespaces=tuple(namespace for namespace, count in heard.most_common(2) if count),
        cards=announced or _inferred(ranks, block_size),
        inferred=not announced,
    )


def route_of(subject: str) -> wire.Route | None:
    """Return where a subject points, None when it is neither Dynamo's nor ours; ours have no component."""
    tokens = subject.split(".")
    if len(tokens) == 3 and tokens[0] == "poa" and tokens[2] in OURS:
        return wire.Route(tokens[1], "", tokens[2])
    try:
        return wire.parse_subject(subject)
    except WireError:
        return None


def _inferred(ranks: dict[tuple[str, int], int], block_size: int) -> tuple[WorkerCard, ...]:
    separate = any(component == PREFILL_COMPONENT for component, _ in ranks)
    backend = Role.DECODE if separate else Role.AGGREGATED
    return tuple(
        WorkerCard(
            worker_id=worker_id,
            role=Role.PREFILL if component == PREFILL_COMPONENT else backend,
            kv_block_size=block_size,
            data_parallel_size=min(highest_rank + 1, wire.MAX_RANKS),
        )
        for (component, worker_id), highest_rank in sorted(ranks.items(), key=lambda found: found[0][1])
    )
