"""The relay beside the stream path: when requesters are sent to it, and when they are sent back."""

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exposition import samples_of
from prometheus_client import generate_latest
from relay_parts import ANSWER, OWN, RelayBench
from structlog.testing import capture_logs
from waiting import eventually

from dynamo_poa.clock import SystemClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.config import CommonConfig, RouterConfig
from dynamo_poa.data_path import RelayPath, Served, _limits, _most_calls
from dynamo_poa.errors import ConfigError, RecordUnchangeable
from dynamo_poa.frames import ACCEPTED
from dynamo_poa.relay import MAX_CALLS
from dynamo_poa.router_metrics import RouterMetrics
from dynamo_poa.router_process import RouterProcess
from dynamo_poa.values import Address, Outcome

FILE = f"poa%2Dr%2Fbackend%2Fgenerate%2F{OWN:x}"
FOREIGN = f"{OWN:x}/other"


class Located:
    """What of a pool the data path asks."""

    def __init__(self, bench: RelayBench) -> None:
        self._bench = bench

    def address(self, worker_id: int) -> Address | None:
        return self._bench.locate(worker_id)

    def addresses(self) -> list[Address]:
        return [listener.address(worker) for worker, listener in self._bench.workers.items()]


def recorded(host_and_port: str) -> bytes:
    transport = {"tcp": f"{host_and_port}/{OWN:x}/generate"}
    return json.dumps({"instance_id": OWN, "transport": transport}, separators=(",", ":")).encode()


@pytest.fixture
def discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty discovery in files, named by the environment."""
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    return folder


@asynccontextmanager
async def served(discovery: Path) -> AsyncIterator[tuple[RelayBench, Served, bytes]]:
    """A leg that Dynamo serves, as discovery has it."""
    async with RelayBench() as bench:
        own = bench.own.address(OWN)
        record = recorded(f"{own.host}:{own.port}")
        (discovery / FILE).write_bytes(record)
        pool: Any = Located(bench)
        yield bench, Served(bench.leg, pool, "poa-r.backend.generate", OWN), record


async def test_requesters_are_sent_to_the_relay_while_it_listens_and_then_back(discovery: Path) -> None:
    """Discovery is as Dynamo wrote it once the relay has left."""
    async with served(discovery) as (bench, leg, record):
        with capture_logs() as logs:
            async with RelayPath([leg], SystemClock()) as path:
                ours = recorded(f"127.0.0.1:{path.relay.port}")
                assert (discovery / FILE).read_bytes() == ours
                assert path.in_force
                await bench.requester.connect(path.relay.port)
                assert await bench.requester.ask().whole() == b"".join(ANSWER)
                assert path.relay.forwarded == 1
        assert (discovery / FILE).read_bytes() == record
        assert bench.outcomes() == [Outcome.OK]
        assert logs == [
            {"event": "poa.data_path.chosen", "log_level": "info", "data_path": "relay", "reason": ""}
        ]


async def test_a_leg_that_is_not_in_discovery_leaves_all_on_the_stream(
    discovery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the legs on another path would be worse than none; nothing stays open."""
    monkeypatch.setattr("dynamo_poa.data_path.RECORD_WAIT_S", 0.05)
    async with served(discovery) as (_, leg, record):
        tasks = asyncio.all_tasks()
        missing = leg._replace(instance_id=1)
        with pytest.raises(RecordUnchangeable, match="discovery has no record poa-r/backend/generate/1"):
            await RelayPath([leg, missing], SystemClock()).__aenter__()
        assert (discovery / FILE).read_bytes() == record
        assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("data_path", ["auto", "relay"])
async def test_where_the_relay_cannot_listen_auto_stays_on_the_stream_and_says_why(
    discovery: Path, data_path: Any
) -> None:
    """Another machine's address, as behind a translated one; who insists on the relay is told."""
    async with served(discovery) as (_, leg, _), AsyncExitStack() as stack:
        elsewhere = recorded("203.0.113.1:5000")
        (discovery / FILE).write_bytes(elsewhere)
        process = RouterProcess(CommonConfig(discovery="file"), RouterConfig(data_path=data_path), 0)
        process._served.append(leg)
        insists = pytest.raises(ConfigError) if data_path == "relay" else contextlib.nullcontext()
        with capture_logs() as logs, insists as refused:
            assert await process._data_path(stack) is None
        why = refused.value.problems[0] if refused else logs[0]["reason"]
        assert "the relay cannot listen: " in why
        assert "cannot assign requested address" in why
        assert (discovery / FILE).read_bytes() == elsewhere


async def test_a_relay_that_gives_up_sends_requesters_back_and_serves_those_that_still_come(
    discovery: Path,
) -> None:
    """Issue: three frames not understood in a minute; kept connections know of no switch."""
    async with served(discovery) as (bench, leg, record), RelayPath([leg], SystemClock()) as path:
        await bench.requester.connect(path.relay.port)
        with capture_logs() as logs:
            for _ in range(3):
                assert await bench.requester.ask(path=FOREIGN).whole() == b"".join(ANSWER)
            await eventually(lambda: (discovery / FILE).read_bytes() == record)
        assert not path.in_force
        assert [line for line in logs if line["event"] == "poa.data_path.chosen"] == [
            {
                "event": "poa.data_path.chosen",
                "log_level": "error",
                "data_path": "stream",
                "reason": "frames not understood: {'path': 3}",
            }
        ]
        assert await bench.requester.ask().whole() == b"".join(ANSWER)
        assert await bench.requester.ask(path=FOREIGN).whole() == b"".join(ANSWER)
        assert bytes(bench.requester.acks) == ACCEPTED * 5
        assert bench.outcomes() == [Outcome.OK]


async def test_a_relay_that_no_worker_can_reach_is_given_up(
    discovery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo's own answers may come by another interface: `auto` must not be worse than the stream."""
    monkeypatch.setattr("dynamo_poa.relay_answers.FIRST_DIAL_BACK_S", 0.05)
    async with served(discovery) as (bench, leg, record), RelayPath([leg], SystemClock()) as path:
        await bench.requester.connect(path.relay.port)
        bench.script(None)
        bench.requester.ask()
        await eventually(lambda: bench.outcomes() == [Outcome.FAILED])  # both workers, one after the other
        assert path.in_force
        with capture_logs() as logs:
            bench.requester.ask()
            await eventually(lambda: (discovery / FILE).read_bytes() == record)
        assert not path.in_force
        assert [line["reason"] for line in logs if line["event"] == "poa.data_path.chosen"] == [
            f"no worker has ever dialled back to {path.answers.address}"
        ]


async def test_a_relay_that_workers_have_reached_is_not_given_up_for_those_that_are_slow(
    discovery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with more requests than its pool takes queues them, and dials back when it is their turn."""
    monkeypatch.setattr("dynamo_poa.relay_answers.FIRST_DIAL_BACK_S", 0.05)
    async with served(discovery) as (bench, leg, _), RelayPath([leg], SystemClock()) as path:
        await bench.requester.connect(path.relay.port)
        assert await bench.requester.ask().whole() == b"".join(ANSWER)
        bench.script(None)
        slow = bench.requester.ask()
        await eventually(lambda: path.answers.awaited == 1)
        await asyncio.sleep(0.1)
        (worker,) = [worker for worker in bench.workers.values() if len(worker.frames) > len(worker.dials)]
        dial = await worker.dial(worker.requests[-1])
        dial.begin()
        dial.say(*ANSWER)
        assert await slow.whole() == b"".join(ANSWER)
        await eventually(lambda: bench.outcomes() == [Outcome.OK, Outcome.OK])
        assert path.in_force
        assert not path.answers.unheard.is_set()


async def test_a_record_that_cannot_be_put_back_is_tried_again(
    discovery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requesters would go on to a relay that does not understand them."""
    monkeypatch.setattr("dynamo_poa.data_path.RESTORE_PAUSE_S", 0.02)
    async with served(discovery) as (_, leg, record), RelayPath([leg], SystemClock()) as path:
        ours = (discovery / FILE).read_bytes()
        (discovery / ".tmp_bad").symlink_to(FILE)  # to itself, once it is there: it cannot be read
        os.replace(discovery / ".tmp_bad", discovery / FILE)
        with capture_logs() as logs:
            path.relay.gave_up.set()
            await eventually(lambda: sum(line["event"] == "poa.record.left" for line in logs) > 1)
            (discovery / ".tmp_ours").write_bytes(ours)
            os.replace(discovery / ".tmp_ours", discovery / FILE)
            await eventually(lambda: (discovery / FILE).read_bytes() == record)


async def test_what_runs_is_drained_before_the_relay_closes(discovery: Path) -> None:
    """Requesters are sent away first."""
    async with served(discovery) as (bench, leg, record):
        gate = asyncio.Event()

        async def wait(dial: Any) -> None:
            dial.begin()
            dial.say(ANSWER[0])
            await gate.wait()
            dial.say(*ANSWER[1:])

        bench.script(wait)
        async with RelayPath([leg], SystemClock()) as path:
            await bench.requester.connect(path.relay.port)
            asked = bench.requester.ask()
            await asked.has(ANSWER[0])
            await path.restore()
            assert (discovery / FILE).read_bytes() == record
            draining = asyncio.ensure_future(path.drained(5))
            await asyncio.sleep(0.02)
            assert not draining.done()
            gate.set()
            assert await asked.whole() == b"".join(ANSWER)
            await draining
        assert bench.outcomes() == [Outcome.OK]


@pytest.mark.parametrize(
    ("set_to", "payload_bytes"), [(None, 32 * 2**20), ("1000", 1000), ("large", 32 * 2**20)]
)
def test_requests_may_be_as_large_as_dynamo_takes_them(
    set_to: str | None, payload_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound of its users' own goes for both paths."""
    monkeypatch.delenv("DYN_TCP_MAX_MESSAGE_SIZE", raising=False)
    if set_to is not None:
        monkeypatch.setenv("DYN_TCP_MAX_MESSAGE_SIZE", set_to)
    assert _limits().payload_bytes == payload_bytes


@pytest.mark.parametrize(
    ("soft", "hard", "calls", "asked_for"),
    [
        (1024, 20_000, (20_000 - 1024) // 3, [(20_000, 20_000)]),
        (20_000, 20_000, 6325, []),
        (256, 256, 1, []),
        (1024, 1_048_576, MAX_CALLS, [(1_048_576, 1_048_576)]),
        (1024, resource.RLIM_INFINITY, MAX_CALLS, [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]),
    ],
)
def test_no_more_requests_are_taken_over_than_there_are_files_for(
    soft: int, hard: int, calls: int, asked_for: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual 1024 would do for 500; a worker that cannot dial back would be taken for a dead one."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert (_most_calls(), given) == (calls, asked_for)


async def test_metrics_show_the_path_in_force_and_what_the_relay_did(discovery: Path) -> None:
    """And nothing of a relay where there is none."""
    holder: Any = SimpleNamespace(
        current=SimpleNamespace(router_temperature=0.0, overlap_weight=1.0, revision=0), refused={}
    )
    reporter: Any = SimpleNamespace(loop_lag_s=0.0, sent=0, dropped=0)
    bus: Any = SimpleNamespace(connected=True, reconnects=0)
    async with served(discovery) as (bench, leg, _):
        metrics = RouterMetrics(
            bench.stats, holder, reporter, bus, CoefficientsHolder(bench.clock.monotonic_s)
        )

        def shown() -> dict[str, float]:
            samples = samples_of(generate_latest(metrics.registry).decode())
            return {name: value for name, value in samples.items() if name.startswith("poa_router_relay_")}

        assert shown() == {"poa_router_relay_in_force": 0}
        async with RelayPath([leg], SystemClock()) as path:
            metrics.path = path
            await bench.requester.connect(path.relay.port)
            await bench.requester.ask().whole()
            await bench.requester.ask(path=FOREIGN).whole()
            await eventually(lambda: path.answers.open == 0)
            assert shown() == {
                "poa_router_relay_in_force": 1,
                "poa_router_relay_requests_total": 1,
                "poa_router_relay_frames_lost_total": 0,
                "poa_router_relay_dialled_in_vain_total": 0,
                'poa_router_relay_handed_on_total{reason="path"}': 1,
                'poa_router_relay_connections{of="requests"}': 1,
                'poa_router_relay_connections{of="answers"}': 0,
                'poa_router_relay_connections{of="workers"}': 2,
            }
