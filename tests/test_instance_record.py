"""Our record in discovery: found, pointed to the relay, put back; in files and in a stand-in for etcd.

The stand-in answers as the v3 JSON gateway of etcd 3.4.23 was seen to: 64-bit numbers as text, false and
empty left out.
"""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from dynamo_poa.clock import ManualClock, SystemClock
from dynamo_poa.errors import RecordUnchangeable
from dynamo_poa.instance_record import EtcdStore, FileStore, InstanceRecord, store_of
from dynamo_poa.values import Address

ID = 17678888999626880149  # above 2^63
ENDPOINT = "poa-1.backend.generate"
KEY = "poa-1/backend/generate/f55807e0de523495"
FILE = "poa%2D1%2Fbackend%2Fgenerate%2Ff55807e0de523495"
OWN = "127.0.0.1:36817/f55807e0de523495/generate"
VALUE = (
    b'{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":"poa-1",'
    b'"instance_id":17678888999626880149,"transport":{"tcp":"' + OWN.encode() + b'"},'
    b'"device_type":"cuda","request_plane_codec":"msgpack","note":"\xc3\xbc"}'
)
OURS = VALUE.replace(b"127.0.0.1:36817", b"10.0.0.7:4000")


def folder_of(root: Path) -> Path:
    folder = root / "v1" / "instances"
    folder.mkdir(parents=True)
    return folder


def record_in(store: Any, clock: Any = None) -> InstanceRecord:
    return InstanceRecord(store, ENDPOINT, ID, clock or SystemClock())


async def test_only_the_listeners_host_and_port_are_rewritten_and_then_put_back(tmp_path: Path) -> None:
    """All else stays byte for byte, the 64-bit id among it. Source: record as ai-dynamo 1.4.2 writes it."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(VALUE)
    record = record_in(FileStore(tmp_path))
    assert await record.wait(1) == Address("127.0.0.1", 36817, "f55807e0de523495/generate")
    assert str(await record.rewrite("10.0.0.7", 4000)) == OWN
    assert (file.read_bytes(), record.rewritten) == (OURS, True)
    assert await record.restore() is True
    assert (file.read_bytes(), record.rewritten) == (VALUE, False)
    assert await record.restore() is False


async def test_the_new_file_is_fresh_whole_and_readable_as_the_old_one_was(tmp_path: Path) -> None:
    """Others remove a file untouched for 10 s, and may be other users; nothing else is left in the folder."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(VALUE)
    file.chmod(0o640)
    os.utime(file, (1000, 1000))
    old = file.stat().st_ino
    await record_in(FileStore(tmp_path)).rewrite("10.0.0.7", 4000)
    new = file.stat()
    assert new.st_mtime > 1_700_000_000
    assert new.st_ino != old  # a rename: no reader ever saw half of it
    assert new.st_mode & 0o777 == 0o640
    assert [entry.name for entry in file.parent.iterdir()] == [FILE]


async def test_the_record_is_awaited_for_as_long_as_was_said(tmp_path: Path) -> None:
    """`serve_endpoint` writes it in its own time; a name that is not ours does not count."""
    folder = folder_of(tmp_path)
    (folder / FILE[:-1]).write_bytes(VALUE)
    clock = ManualClock()
    record = record_in(FileStore(tmp_path), clock)
    waiting = asyncio.ensure_future(record.wait(1.0))
    for _ in range(20):
        await clock.advance(0.02)
        await asyncio.sleep(0.01)
    assert not waiting.done()
    (folder / FILE).write_bytes(VALUE)
    while not waiting.done():
        await clock.advance(0.02)
        await asyncio.sleep(0.01)
    assert str(waiting.result()) == OWN
    (folder / FILE).unlink()
    waiting = asyncio.ensure_future(record.wait(1.0))
    while not waiting.done():
        await clock.advance(0.1)
        await asyncio.sleep(0.01)
    with pytest.raises(RecordUnchangeable) as caught:
        waiting.result()
    assert caught.value.reason == f"discovery has no record {KEY} after 1 s"


async def test_a_record_that_has_gone_is_not_brought_back(tmp_path: Path) -> None:
    """The endpoint was unregistered: a record now would send requests into the void."""
    file = folder_of(tmp_path) / FILE
    record = record_in(FileStore(tmp_path))
    with pytest.raises(RecordUnchangeable, match="has no record"):
        await record.rewrite("10.0.0.7", 4000)
    file.write_bytes(VALUE)
    await record.rewrite("10.0.0.7", 4000)
    file.unlink()
    assert await record.restore() is False
    assert list(file.parent.iterdir()) == []


async def test_what_dynamo_wrote_anew_is_left_alone_and_can_be_rewritten_again(tmp_path: Path) -> None:
    """Registering the endpoint a second time puts Dynamo's own address back, maybe another one."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(VALUE)
    record = record_in(FileStore(tmp_path))
    await record.rewrite("10.0.0.7", 4000)
    anew = VALUE.replace(b"36817", b"36999")
    file.write_bytes(anew)
    assert await record.restore() is False
    assert file.read_bytes() == anew
    await record.rewrite("10.0.0.7", 4000)
    assert await record.restore() is True
    assert file.read_bytes() == anew


async def test_rewriting_twice_still_restores_what_dynamo_wrote(tmp_path: Path) -> None:
    """The relay's listener may move; the way back does not lead to its former address."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(VALUE)
    record = record_in(FileStore(tmp_path))
    await record.rewrite("10.0.0.7", 4000)
    assert str(await record.rewrite("::1", 4001)) == OWN
    assert json.loads(file.read_bytes())["transport"]["tcp"] == "[::1]:4001/f55807e0de523495/generate"
    await record.restore()
    assert file.read_bytes() == VALUE


async def test_leaving_the_block_restores_the_record_also_after_an_error(tmp_path: Path) -> None:
    """A relay that fails must not leave its address behind."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(VALUE)

    async def failing() -> None:
        async with record_in(FileStore(tmp_path)) as record:
            await record.rewrite("10.0.0.7", 4000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    assert file.read_bytes() == VALUE


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is not a mapping"),
        (b"{}", "not reached over tcp: transport = None"),
        (b'{"transport":{"nats_tcp":"x"}}', "not reached over tcp"),
        (b'{"transport":{"tcp":"127.0.0.1"}}', "address was not understood"),
        (b'{"transport":{"tcp":"127.0.0.1:0/a/generate"}}', "address was not understood"),
        (b'{"transport":{"tcp":"127.0.0.1:99999/a/generate"}}', "address was not understood"),
    ],
)
async def test_a_record_of_another_kind_is_refused_with_the_reason(
    tmp_path: Path, value: bytes, reason: str
) -> None:
    """`auto` then stays on the stream path; the record is as it was."""
    file = folder_of(tmp_path) / FILE
    file.write_bytes(value)
    with pytest.raises(RecordUnchangeable, match=reason):
        await record_in(FileStore(tmp_path)).rewrite("10.0.0.7", 4000)
    assert file.read_bytes() == value


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The record is a folder here, which no right lets anybody replace: root runs the tests too."""
    (folder_of(tmp_path) / FILE).mkdir()
    with pytest.raises(RecordUnchangeable, match="cannot be read"):
        await record_in(FileStore(tmp_path)).rewrite("10.0.0.7", 4000)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"DYN_DISCOVERY_BACKEND": "kubernetes"}, "backend 'kubernetes' cannot be rewritten"),
        ({"DYN_DISCOVERY_BACKEND": "mem"}, "backend 'mem' cannot be rewritten"),
        ({"DYN_DISCOVERY_BACKEND": "file"}, "DYN_FILE_KV does not say where"),
        ({"ETCD_ENDPOINTS": "https://etcd:2379"}, "uses TLS"),
        (
            {"ETCD_AUTH_USERNAME": "u", "ETCD_AUTH_PASSWORD": "p"},
            "authentication is not supported",
        ),
    ],
)
def test_discovery_that_cannot_be_rewritten_is_refused_with_the_reason(
    environ: dict[str, str], reason: str
) -> None:
    """Kubernetes keeps instances in objects that Dynamo alone writes."""
    with pytest.raises(RecordUnchangeable, match=reason):
        store_of(environ)


def test_an_address_is_read_as_discovery_writes_it_and_written_back_the_same() -> None:
    """The instance's id is the path's first part, in hex, and may pass 2^63."""
    address = Address.parse(OWN)
    assert (address.worker_id, str(address)) == (ID, OWN)
    six = "[fe80::1]:80/a/b/c"
    assert (Address.parse(six), str(Address.parse(six))) == (Address("fe80::1", 80, "a/b/c"), six)
    assert Address.parse("::1:80/a/b") == Address("::1", 80, "a/b")  # as Dynamo writes return addresses
    for text in ("", "h:1", "h:1/", "h:1/a", "h:x/a/b", ":1/a/b", "h:1:2/a/b", "h:1/x/b"):
        with pytest.raises(ValueError, match="must be host:port"):
            Address.parse(text)


class Etcd:
    """One key under one lease, as the JSON gateway shows it."""

    def __init__(self, value: bytes | None) -> None:
        self.value, self.revision, self.lease = value, 7, "8493967190943228421"
        self.between = 0  # so many writes by somebody else come between a read and the next transaction
        self.asked: list[str] = []

    async def range(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(base64.b64decode(body["key"]).decode())
        header = {"cluster_id": "1", "revision": str(self.revision)}
        if self.value is None:
            return web.json_response({"header": header})
        kv = {
            "key": body["key"],
            "create_revision": "2",
            "mod_revision": str(self.revision),
            "version": "1",
            "value": base64.b64encode(self.value).decode(),
            "lease": self.lease,
        }
        return web.json_response({"header": header, "kvs": [kv], "count": "1"})

    async def txn(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.between:
            self.between -= 1
            self.revision += 1
        (compare,), (success,) = body["compare"], body["success"]
        put = success["requestPut"]
        assert (compare["target"], compare["result"]) == ("MOD", "EQUAL")
        if compare["modRevision"] != str(self.revision):
            return web.json_response({"header": {}})
        self.value, self.lease = base64.b64decode(put["value"]), put["lease"]
        self.revision += 1
        return web.json_response({"header": {}, "succeeded": True})


@asynccontextmanager
async def gateway(etcd: Etcd) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/v3/kv/range", etcd.range), web.post("/v3/kv/txn", etcd.txn)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_in_etcd_the_record_is_replaced_under_its_own_lease_and_put_back() -> None:
    """Under no lease or another one it would outlive its owner, or end before it."""
    etcd = Etcd(VALUE)
    async with gateway(etcd) as url:
        record = record_in(EtcdStore((url,)))
        assert str(await record.wait(1)) == OWN
        await record.rewrite("10.0.0.7", 4000)
        assert (etcd.value, etcd.lease, etcd.revision) == (OURS, "8493967190943228421", 8)
        assert await record.restore() is True
    assert (etcd.value, etcd.lease, etcd.revision) == (VALUE, "8493967190943228421", 9)
    assert set(etcd.asked) == {f"v1/instances/{KEY}"}


async def test_in_etcd_a_write_in_between_makes_it_read_again() -> None:
    """Compare and swap on the revision; somebody who writes all the time is told, not overwritten."""
    etcd = Etcd(VALUE)
    async with gateway(etcd) as url:
        etcd.between = 2
        await record_in(EtcdStore((url,))).rewrite("10.0.0.7", 4000)
        assert (etcd.value, etcd.revision, len(etcd.asked)) == (OURS, 10, 3)
        etcd.value, etcd.between = VALUE, 3
        with pytest.raises(RecordUnchangeable, match="changes faster"):
            await record_in(EtcdStore((url,))).rewrite("10.0.0.7", 4000)
        assert etcd.value == VALUE


async def test_in_etcd_a_record_that_has_gone_stays_gone() -> None:
    """Its lease has ended: there is nothing to put back."""
    etcd = Etcd(VALUE)
    async with gateway(etcd) as url:
        record = record_in(EtcdStore((url,)))
        await record.rewrite("10.0.0.7", 4000)
        etcd.value = None
        assert await record.restore() is False
    assert etcd.value is None


async def test_the_next_endpoint_is_asked_when_one_does_not_answer() -> None:
    """ETCD_ENDPOINTS lists the members of a cluster; without a scheme http is meant, as for Dynamo."""
    etcd = Etcd(VALUE)
    async with gateway(etcd) as url:
        endpoints = f"127.0.0.1:9, {url.removeprefix('http://')}"
        await record_in(store_of({"ETCD_ENDPOINTS": endpoints})).rewrite("10.0.0.7", 4000)
    assert etcd.value == OURS


async def test_etcd_that_is_away_is_told_and_at_the_end_only_logged() -> None:
    """Leaving goes on: the record ends with our lease all the same."""
    async with gateway(Etcd(VALUE)) as url:
        record = record_in(EtcdStore((url,)))
        await record.rewrite("10.0.0.7", 4000)
    with pytest.raises(RecordUnchangeable, match="etcd did not answer"):
        await record.restore()
    assert record.rewritten
    with capture_logs() as logs:
        await record.__aexit__(None, None, None)
    assert [(line["event"], line["record"]) for line in logs] == [("poa.record.left", KEY)]
