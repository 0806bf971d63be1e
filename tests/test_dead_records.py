"""Whose records leave discovery with a process: its own, all that belong to its instances, and no other's."""

import json
import socket
from pathlib import Path

import pytest

from dynamo_poa.serve.dead_records import refuses, remove_dead_records

DEAD, LIVE = 4001, 4002  # ports


def write(root: Path, bucket: str, key: str, record: object) -> str:
    """Put a record where Dynamo's file backend does; return its key."""
    path = root / "v1" / bucket / key.replace("/", "%2F").replace("-", "%2D")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return f"v1/{bucket}/{key}"


def instance(root: Path, component: str, instance_id: int, port: int, endpoint: str = "generate") -> str:
    """Write an instance's record."""
    tcp = f"127.0.0.1:{port}/{instance_id:x}/{endpoint}"
    record = {"type": "Endpoint", "instance_id": instance_id, "transport": {"tcp": tcp}}
    return write(root, "instances", f"poa-workers/{component}/{endpoint}/{instance_id:x}", record)


def card(root: Path, component: str, instance_id: int) -> str:
    """Write an instance's model card."""
    record = {"type": "Model", "instance_id": instance_id, "card_json": {}}
    return write(root, "mdc", f"poa-workers/{component}/generate/{instance_id:x}", record)


def source(root: Path, publisher_id: int, worker_id: int) -> str:
    """Write what says whose KV events a publisher's are."""
    record = {"type": "EventSource", "metadata": {"worker": {"worker_id": worker_id, "dp_rank": 0}}}
    return write(root, "event_sources", f"kv-events/{publisher_id:x}", record)


def left(root: Path) -> int:
    """Return how many files are there."""
    return sum(path.is_file() for path in root.rglob("*"))


async def test_all_that_belongs_to_a_dead_listeners_instances_goes_and_nothing_else(tmp_path: Path) -> None:
    """Ids span the full uint64: two that are one as doubles are told apart."""
    dead, live = 2**63 + 1, 2**63 + 2
    gone = [
        instance(tmp_path, "prefill", dead, DEAD),
        instance(tmp_path, "prefill", dead, DEAD, "worker_kv_query_source_1"),
        card(tmp_path, "prefill", dead),
        source(tmp_path, 1, dead),
    ]
    instance(tmp_path, "prefill", live, LIVE)
    card(tmp_path, "prefill", live)
    source(tmp_path, 2, live)
    asked: list[tuple[str, int]] = []

    def refused(host: str, port: int) -> bool:
        asked.append((host, port))
        return port == DEAD

    assert sorted(await remove_dead_records(tmp_path, refused)) == sorted(gone)
    assert left(tmp_path) == 3
    assert sorted(asked) == [("127.0.0.1", DEAD), ("127.0.0.1", LIVE)]  # each listener once
    assert await remove_dead_records(tmp_path, refused) == ()


async def test_an_instance_that_is_still_served_somewhere_keeps_its_card(tmp_path: Path) -> None:
    """A router on the relay listens on two ports under one instance."""
    instance(tmp_path, "backend", 7, LIVE)
    gone = instance(tmp_path, "backend", 7, DEAD, "router-discovery")
    card(tmp_path, "backend", 7)
    assert await remove_dead_records(tmp_path, lambda host, port: port == DEAD) == (gone,)
    assert left(tmp_path) == 2


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[1]",
        '{"instance_id": 1}',
        '{"instance_id": 1, "transport": "tcp"}',
        '{"instance_id": 1, "transport": {"nats": "subject"}}',
        '{"instance_id": 1, "transport": {"tcp": "nowhere"}}',
    ],
)
async def test_a_record_that_is_not_understood_is_left_alone(tmp_path: Path, record: str) -> None:
    """It may be a live process's: half written, or another version's."""
    write(tmp_path, "instances", "poa/backend/generate/1", record)
    card(tmp_path, "backend", 1)
    source(tmp_path, 1, 1)
    assert await remove_dead_records(tmp_path, lambda host, port: True) == ()
    assert left(tmp_path) == 3


async def test_a_dead_record_that_names_no_instance_takes_nothing_with_it(tmp_path: Path) -> None:
    """Others name none either: cards and sources of another version."""
    for key, number in (("1", {}), ("2", {"instance_id": [7]})):
        write(tmp_path, "instances", key, {**number, "transport": {"tcp": f"127.0.0.1:{DEAD}/7/generate"}})
    write(tmp_path, "mdc", "1", {"card_json": {}})
    write(tmp_path, "event_sources", "1", {"metadata": {}})
    removed = await remove_dead_records(tmp_path, lambda host, port: True)
    assert removed == ("v1/instances/1", "v1/instances/2")
    assert left(tmp_path) == 2


async def test_an_instance_that_is_also_served_in_a_way_not_understood_keeps_its_card(tmp_path: Path) -> None:
    """On any doubt it lives."""
    gone = instance(tmp_path, "backend", 7, DEAD)
    write(tmp_path, "instances", "other", {"instance_id": 7, "transport": {"nats": "subject"}})
    card(tmp_path, "backend", 7)
    assert await remove_dead_records(tmp_path, lambda host, port: True) == (gone,)
    assert left(tmp_path) == 2


async def test_a_record_that_is_written_anew_meanwhile_stays(tmp_path: Path) -> None:
    """A router that leaves the relay puts its own address back, and only then closes the other."""
    instance(tmp_path, "backend", 7, DEAD)
    instance(tmp_path, "backend", 8, DEAD)

    def refused(host: str, port: int) -> bool:
        instance(tmp_path, "backend", 7, LIVE)
        return port == DEAD

    removed = await remove_dead_records(tmp_path, refused)
    assert removed == ("v1/instances/poa-workers/backend/generate/8",)


async def test_a_folder_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    """An exception here would end the graph."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "instances").write_text("no folder")
    assert await remove_dead_records(tmp_path) == ()


async def test_files_that_are_not_ready_and_folders_that_are_not_there_are_no_matter(tmp_path: Path) -> None:
    """Dynamo writes a record under `.tmp_*` and renames it."""
    assert await remove_dead_records(tmp_path, lambda host, port: True) == ()
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    (folder / ".tmp_1").write_text('{"instance_id": 1, "transport": {"tcp": "127.0.0.1:1/1/generate"}}')
    assert await remove_dead_records(tmp_path, lambda host, port: True) == ()
    assert left(tmp_path) == 1


def test_only_a_listener_that_refuses_is_dead() -> None:
    """One whose queue of connections is full, or whose host is not known, may be alive."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        assert refuses(host, port)  # bound, and nobody listens
        assert not refuses("0.0.0.0", port)  # no address of one process's
        assert not refuses("localhost", port)  # a name
        listener.listen(0)
        assert not refuses(host, port)
    assert refuses(host, port)
    assert not refuses("host.invalid", port)


def test_a_listener_that_is_too_busy_to_answer_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops what its full queue cannot take."""
    monkeypatch.setattr("dynamo_poa.serve.dead_records.CONNECT_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()):
            assert not refuses(*listener.getsockname())
