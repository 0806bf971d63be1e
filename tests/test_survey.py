"""The first reading of a recording: workers announced or inferred, namespaces, which leg answers."""

from pathlib import Path

import msgspec
import pytest
from dynamo_messages import FIXTURES, card, envelope, fp, recorded_cards, subject

from dynamo_poa.errors import RecordingError
from dynamo_poa.recording import Header, Writer
from dynamo_poa.serve.survey import Survey, route_of, survey
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import Cards, Chosen, DecisionBatch, Route

HEADER = Header(recording=1, namespace="poa", started_at_s=1_800_000_000.0, version="0.1.0")
W1, W2 = 14370722098883561847, 7


def passes(worker_id: int, component: str, dp_rank: int = 0, namespace: str = "a") -> tuple[str, bytes]:
    topic, body = fp(worker_id, 1, 0.01, nd=1, dp=dp_rank)
    data = envelope(topic, msgspec.msgpack.encode(body), 1, 0, 1_800_000_000.0)
    return subject(topic, namespace, component), data


def announced(*cards: WorkerCard) -> tuple[str, bytes]:
    return "poa.poa.cards", msgspec.msgpack.encode(Cards(sent_at_s=0.0, cards=cards))


def surveyed(tmp_path: Path, *messages: tuple[str, bytes]) -> Survey:
    path = tmp_path / "r.ndjson"
    with Writer(path, HEADER) as writer:
        for number, (where, data) in enumerate(messages):
            writer.write(1_800_000_000.0 + number, where, data)
    return survey(path, 16)


def test_announced_cards_are_believed_from_the_start(tmp_path: Path) -> None:
    """The first announcement may come seconds after the first message; forward passes do not outvote it."""
    found = surveyed(
        tmp_path,
        passes(W1, "backend"),
        ("poa.poa.cards", b"\xc1"),
        announced(card(W2, Role.DECODE, 512)),
        announced(card(W1)),
    )
    assert (found.cards, found.inferred) == ((card(W2, Role.DECODE, 512),), False)


@pytest.mark.parametrize(
    ("components", "roles"),
    [
        (("prefill", "backend"), {W1: Role.PREFILL, W2: Role.DECODE}),
        (("backend", "backend"), {W1: Role.AGGREGATED, W2: Role.AGGREGATED}),
    ],
)
def test_workers_are_inferred_from_their_passes(
    tmp_path: Path, components: tuple[str, str], roles: dict[int, Role]
) -> None:
    """Decode and aggregated workers share a component: whether prefill ones exist tells which they are."""
    found = surveyed(
        tmp_path,
        passes(W1, components[0]),
        passes(W2, components[1], dp_rank=1),
        ("poa.poa.cards", b""),
        (passes(W2, "backend")[0], b"not a pass"),
    )
    assert found.inferred
    assert found.cards == (
        card(W2, roles[W2], total_kv_blocks=None, ranks=2),
        card(W1, roles[W1], total_kv_blocks=None),
    )


def test_workers_may_be_in_two_namespaces(tmp_path: Path) -> None:
    """Those the frontend sees directly stand in the graph's own; a third is somebody else's."""
    found = surveyed(
        tmp_path,
        *([passes(1, "prefill", namespace="g-workers")] * 3),
        *([passes(2, "backend", namespace="g")] * 2),
        passes(3, "backend", namespace="other"),
        ("poa.g.params", b""),
    )
    assert found.namespaces == ("g-workers", "g")


@pytest.mark.parametrize(
    ("roles", "answering"),
    [
        ((), {Role.PREFILL}),
        ((Role.PREFILL,), {Role.PREFILL}),
        ((Role.PREFILL, Role.DECODE), {Role.DECODE, Role.AGGREGATED}),
        ((Role.AGGREGATED,), {Role.DECODE, Role.AGGREGATED}),
    ],
)
def test_prefill_answers_only_where_routers_see_no_other_leg(
    tmp_path: Path, roles: tuple[Role, ...], answering: set[Role]
) -> None:
    """router.legs = [prefill], as in the controller."""
    events = tuple(Chosen("r", role, 0.0, 0.0, 1, 0, 3, 1, 1, ()) for role in roles)
    data = msgspec.msgpack.encode(DecisionBatch(router_id="r", sequence=0, sent_at_s=0.0, events=events))
    assert surveyed(tmp_path, ("poa.poa.decisions", data)).answering == answering


def test_the_workers_of_a_raw_recording_are_those_discovery_listed() -> None:
    """disagg_2p3d holds no cards of ours; its meta file says who was there."""
    found = survey(FIXTURES / "disagg_2p3d.ndjson.gz", 16)
    listed = {card.worker_id: card.role for card in recorded_cards("disagg_2p3d", "workers")}
    assert {card.worker_id: card.role for card in found.cards} == listed
    assert (found.inferred, found.namespaces) == (True, ("workers",))
    assert {card.total_kv_blocks for card in found.cards} == {None}


def test_a_folder_or_a_pipe_is_refused(tmp_path: Path) -> None:
    """It is read twice."""
    with pytest.raises(RecordingError, match="must be a file: it is read twice"):
        survey(tmp_path, 16)


def test_subjects_of_ours_and_of_dynamo_are_told_from_others() -> None:
    """Neither is guessed at."""
    assert route_of("poa.g.cards") == Route("g", "", "cards")
    assert route_of(subject("kv-events", "n", "prefill")) == Route("n", "prefill", "kv-events")
    assert [route_of(other) for other in ("poa.g.control", "poa.g.h.cards", "x", "")] == [None] * 4
