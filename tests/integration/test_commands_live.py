"""The commands as a person runs them: processes of their own against a real nats-server."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from nats_server import NatsServer, free_port
from records import RECORD
from waiting import eventually

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.control import ControlService
from dynamo_poa.recording import Line, Reader
from dynamo_poa.telemetry import BusSink
from dynamo_poa.values import Applied, Candidate, Mode, Outcome, ParamsKind, Pin, Role
from dynamo_poa.wire import Chosen, DecisionBatch, Ended, FirstToken

TICK_S = 0.05
PROGRAM = (sys.executable, "-c", "from dynamo_poa.serve.cli import main; main()")


class Result(NamedTuple):
    status: int
    out: str
    err: str


class Controller:
    """Answers with the real service, and ticks: telemetry and decisions; a pin counts from the next tick."""

    def __init__(self, bus: Bus) -> None:
        self.latest = RECORD
        self.batches = 0
        self._bus = bus
        self._pin: Pin | None = None

    def pin(self, pin: Pin) -> None:
        self._pin = pin

    def release(self, *, forget: bool = False) -> None:
        self._pin = None

    async def run(self) -> None:
        sink = BusSink(self._bus, "poa")
        while True:
            record = msgspec.structs.replace(RECORD, tick=self.latest.tick + 1)
            if self._pin is not None:
                left_s = (
                    None if self._pin.until_s is None else self._pin.until_s - SystemClock().monotonic_s()
                )
                record = msgspec.structs.replace(
                    record,
                    router_temperature=self._pin.router_temperature,
                    overlap_weight=self._pin.overlap_weight,
                    revision=RECORD.revision + 1,
                    kind=ParamsKind.PIN,
                    applied=Applied.HELD_PIN,
                    pin_left_s=left_s,
                )
            self.latest = record
            await sink.emit(record)
            await self._bus.publish("poa.poa.decisions", self._decisions())
            await self._bus.publish(
                "namespace.poa-workers.component.prefill.endpoint.generate.kv_metrics", b"x"
            )
            await asyncio.sleep(TICK_S)

    def _decisions(self) -> bytes:
        number, self.batches = self.batches, self.batches + 1
        at_s, request_id, role = 1_800_000_000.0 + number, f"r{number}", Role.DECODE
        candidates = (Candidate(1, 0, 0, 16, 0, 0), Candidate(2, 0, 0, 16, 0, 0))
        events = (
            Chosen(request_id, role, at_s, at_s, 1, 0, 3, 1, 1, candidates),
            FirstToken(request_id, role, at_s + 0.25),
            Ended(request_id, role, at_s + 1.0, Outcome.OK),
        )
        batch = DecisionBatch(router_id="r", sequence=number, sent_at_s=at_s, events=events)
        return msgspec.msgpack.encode(batch)


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[Controller]:
    """A controller in namespace `poa` of the test's server, in mode active."""
    async with Bus(nats_server.url, name="controller", clock=SystemClock()) as bus:
        await bus.wait_connected(5)
        controller = Controller(bus)
        bus.respond("poa.poa.control", ControlService(controller, Mode.ACTIVE, SystemClock()).answer)
        task = asyncio.create_task(controller.run())
        yield controller
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def environment(tmp_path: Path, nats_server: NatsServer) -> dict[str, str]:
    """No graph of this user's in sight, the server named by the environment, a wide terminal."""
    (tmp_path / "run").mkdir()
    return os.environ | {
        "NATS_SERVER": nats_server.url,
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "COLUMNS": "160",
        "LINES": "50",
        "TERM": "xterm",
    }


async def start(environment: dict[str, str], *arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    streams = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE} | streams
    return await asyncio.create_subprocess_exec(*PROGRAM, *arguments, env=environment, **streams)


async def finish(process: asyncio.subprocess.Process) -> Result:
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Result(process.returncode, (out or b"").decode(), (err or b"").decode())


async def run(environment: dict[str, str], *arguments: str) -> Result:
    return await finish(await start(environment, *arguments))


async def test_status_shows_the_latest_record(controller: Controller, environment: dict[str, str]) -> None:
    """One request on the control subject; a table, or with --json the record."""
    shown, printed = await asyncio.gather(run(environment, "status"), run(environment, "status", "--json"))
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith(f"namespace poa at {environment['NATS_SERVER']}\ngraph       poa, ")
    assert "regime      transition  TTFT P99 2.000 s at or over θ1 1.000 s" in shown.out
    assert "parameters  τ 0.7 ω 1, revision 3, policy, applied" in shown.out
    record = msgspec.json.decode(printed.out, type=type(RECORD))
    assert msgspec.structs.replace(record, tick=RECORD.tick) == RECORD
    assert printed.out.count("\n") == 1


async def test_explain_without_a_recording_says_in_words_how_it_is_now(
    controller: Controller, environment: dict[str, str]
) -> None:
    """Issue 7: where the inefficiency is; an instant needs a recording, and a recording an instant."""
    shown, early = await asyncio.gather(run(environment, "explain"), run(environment, "explain", "--at", "3"))
    assert shown.out.splitlines() == [
        f"namespace poa at {environment['NATS_SERVER']}",
        "transition: TTFT P99 2.000 s at or over θ1 1.000 s",
        "no cost beyond that of an unloaded system is known",
        "",
        "routing    PoA-hat 1.500",
        "caching    PoA-hat none: not priced yet",
        "split      PoA-hat none: not priced yet",
    ]
    assert early == Result(
        2, "", "error: --at = '3': needs a recording; a running graph is explained as it is now\n"
    )


async def test_set_pins_and_release_gives_back(controller: Controller, environment: dict[str, str]) -> None:
    """What is printed is what is in force after the next tick, not what was before."""
    where = f"namespace poa at {environment['NATS_SERVER']}\n"
    policy = f"{where}τ 0.7 ω 1, revision 3, policy, applied\n"
    pinned = await run(
        environment, "set", "--router-temperature", "0.25", "--overlap-weight", "0.5", "--for", "5m"
    )
    assert (pinned.status, pinned.err) == (0, "")
    assert re.fullmatch(
        re.escape(where) + r"τ 0\.25 ω 0\.5, revision 4, pin for another (299|300) s, held_pin; "
        r"the policy would set τ 0\.7 ω 1\n",
        pinned.out,
    )
    assert await run(environment, "release") == Result(0, policy, "")
    for_ever = await run(environment, "set", "--router-temperature", "0", "--overlap-weight", "2")
    assert for_ever.out == f"{where}τ 0 ω 2, revision 4, pin, held_pin; the policy would set τ 0.7 ω 1\n"


async def test_bad_values_are_one_line_each_and_nothing_changes(
    controller: Controller, environment: dict[str, str]
) -> None:
    """Exit 2, never a traceback."""
    result = await run(environment, "set", "--router-temperature", "-1", "--overlap-weight", "inf")
    assert result == Result(
        2,
        "",
        "error: router_temperature = -1.0: must be a finite number in [0, 100]\n"
        "error: overlap_weight = inf: must be a finite number in [0, 2]\n",
    )
    assert controller.latest.kind is ParamsKind.POLICY


async def test_the_controllers_refusal_is_shown(nats_server: NatsServer, environment: dict[str, str]) -> None:
    """Mode off takes no pin: its words, exit 2."""
    async with Bus(nats_server.url, name="controller", clock=SystemClock()) as bus:
        await bus.wait_connected(5)
        service = ControlService(Controller(bus), Mode.OFF, SystemClock())
        bus.respond("poa.poa.control", service.answer)
        result = await run(environment, "release")
    assert result == Result(
        2, "", "error: the controller refuses: mode = 'off': must be shadow or active for release\n"
    )


async def test_a_second_graph_in_the_namespace_is_refused(
    controller: Controller, nats_server: NatsServer, environment: dict[str, str]
) -> None:
    """Two controllers would steer each other's routers: exit 2, one line, nothing started."""
    options = (f"--Common.nats_url={nats_server.url}", "--Frontend.http_port=0")
    assert await run(environment, "serve", "graphs.disagg_poa:Frontend", *options) == Result(
        2,
        "",
        f"error: Common.namespace = 'poa': a controller already runs it at {nats_server.url}; "
        "choose another namespace or stop it\n",
    )


async def test_without_a_controller_each_request_is_one_clear_line(
    nats_server: NatsServer, environment: dict[str, str]
) -> None:
    """Exit 2, at once, naming namespace and server."""
    expected = f"error: no controller answers in namespace other at {nats_server.url}\n"
    assert await run(environment, "status", "--namespace", "other") == Result(2, "", expected)


async def test_without_a_server_the_message_names_it(environment: dict[str, str]) -> None:
    """Exit 2 after five seconds."""
    unused_url = f"nats://127.0.0.1:{free_port()}"
    result = await run(environment, "status", "--nats", unused_url)
    assert result.status == 2
    assert result.err.startswith(f"error: NATS at {unused_url}: no connection within 5 s (")
    assert result.err.count("\n") == 1


async def test_an_answer_that_is_none_is_one_clear_line(
    nats_server: NatsServer, environment: dict[str, str]
) -> None:
    """Something else answers on the subject."""
    async with Bus(nats_server.url, name="stranger", clock=SystemClock()) as bus:
        await bus.wait_connected(5)
        bus.respond("poa.poa.control", lambda _: b"hello")
        result = await run(environment, "status")
    assert result.status == 2
    assert result.err.startswith("error: the answer on poa.poa.control is not this version's: ")
    assert result.err.count("\n") == 1


async def test_without_server_or_graph_it_says_how_to_name_one(environment: dict[str, str]) -> None:
    """Exit 2; the environment names nothing."""
    del environment["NATS_SERVER"]
    expected = "error: no graph of this user is running: name one with --nats URL --namespace NAME\n"
    assert await run(environment, "watch", "--json") == Result(2, "", expected)


async def test_watch_json_prints_a_record_a_line_until_its_reader_goes(
    controller: Controller, environment: dict[str, str]
) -> None:
    """Each line as soon as it comes; a broken pipe ends it without a word."""
    read_end, write_end = os.pipe()
    process = await start(environment, "watch", "--json", stdout=write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as lines:
        records = [
            msgspec.json.decode(await asyncio.to_thread(lines.readline), type=type(RECORD)) for _ in range(3)
        ]
    assert [record.tick - records[0].tick for record in records] == [0, 1, 2]
    assert (await finish(process)).err == ""


async def test_watch_json_ends_quietly_on_a_signal(
    controller: Controller, environment: dict[str, str]
) -> None:
    """SIGTERM, as from `timeout`, is an ordinary end; every line is whole."""
    process = await start(environment, "watch", "--json")
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    result = await finish(process)
    assert (result.status, result.err) == (0, "")
    assert all(json.loads(line)["namespace"] == "poa" for line in result.out.splitlines())


async def test_watch_shows_the_record_live_and_each_change(
    controller: Controller, environment: dict[str, str]
) -> None:
    """On a terminal, ended by Ctrl-C: regime in colour, parameters, and the swap as it happens."""
    ours, theirs = pty.openpty()
    process = await start(environment, "watch", stdout=theirs, start_new_session=True)
    os.close(theirs)
    shown = await shown_until(ours, "none since the start of this view")
    assert "\x1b[1;33mtransition" in shown
    controller.pin(Pin(router_temperature=0.25, overlap_weight=0.5))
    await shown_until(ours, "τ 0.7 ω 1 policy -> τ 0.25 ω 0.5 pin, revision 4")
    process.send_signal(signal.SIGINT)
    await shown_until(ours, "\x1b[?25h")  # the cursor is back
    assert (await finish(process)).status == 0
    os.close(ours)


async def shown_until(terminal: int, expected: str) -> str:
    """Return what the terminal showed up to the expected text."""
    shown = b""
    async with asyncio.timeout(20):
        while expected.encode() not in shown:
            shown += await asyncio.to_thread(os.read, terminal, 65536)
    return shown.decode(errors="replace")


async def test_watch_says_when_nothing_comes(nats_server: NatsServer, environment: dict[str, str]) -> None:
    """Silence is not a quiet graph: said once, on stderr."""
    process = await start(environment, "watch", "--json", "--namespace", "other")
    assert process.stderr is not None
    async with asyncio.timeout(20):
        line = await process.stderr.readline()
    process.terminate()
    assert line.decode() == "no telemetry in namespace other for 3 s\n"
    assert await finish(process) == Result(0, "", "")


async def test_a_recording_holds_what_was_sent_and_estimates(
    controller: Controller, environment: dict[str, str], tmp_path: Path
) -> None:
    """Record for a second, then the same figures from the file: all on one of two equal workers is 1.0."""
    path = tmp_path / "r.ndjson"
    recorded = await run(environment, "record", str(path), "--for", "1s")
    assert (recorded.status, recorded.out) == (0, "")
    assert re.fullmatch(rf"{path}: \d+ messages, 0\.\d\d MB\n", recorded.err)
    reader = Reader(path)
    lines = list(reader)
    assert reader.header is not None
    assert reader.header.namespace == "poa"
    assert {line.subject for line in lines} == {
        "namespace.poa-workers.component.prefill.endpoint.generate.kv_metrics",
        "poa.poa.decisions",
        "poa.poa.telemetry",
    }
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
    assert reader.header.started_at_s <= lines[0].at_s
    batches = [batch for batch in lines if batch.subject == "poa.poa.decisions"]
    assert sequences(batches) == list(range(sequences(batches)[0], sequences(batches)[0] + len(batches)))

    printed = await run(environment, "estimate", str(path), "--json")
    assert (printed.status, printed.err) == (0, "")
    report = json.loads(printed.out)
    assert report["overall"]["frozen"]["legs"]["decode"]["poa_hat"] == 1.0
    assert report["overall"]["frozen"]["samples"] == len(batches)
    assert report["overall"]["ttft"]["p50_s"] == 0.25
    assert report["legs"] == {"decode": {"ok": len(batches)}}
    assert (report["skipped"], report["unknown"]) == ({}, {})
    shown = await run(environment, "estimate", str(path))
    assert f"frozen     1.0000 of {len(batches)} decisions (decode 1.0000); window" in shown.out


def sequences(batches: list[Line]) -> list[int]:
    return [msgspec.msgpack.decode(batch.data, type=DecisionBatch).sequence for batch in batches]


async def test_a_recording_ended_by_hand_is_whole(
    controller: Controller, environment: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C: no line is cut off, and the closing words come."""
    path = tmp_path / "r.ndjson"
    process = await start(environment, "record", str(path))
    await eventually(lambda: path.exists() and path.read_bytes().count(b"\n") >= 10, within_s=20)
    process.send_signal(signal.SIGINT)
    result = await finish(process)
    assert result.status == 0
    reader = Reader(path)
    assert re.fullmatch(rf"{path}: {len(list(reader))} messages, 0\.\d\d MB\n", result.err)
    assert reader.skipped == {}


async def test_a_recording_of_nothing_says_so(
    nats_server: NatsServer, environment: dict[str, str], tmp_path: Path
) -> None:
    """A misspelt namespace is silent on the event plane."""
    path = tmp_path / "r.ndjson"
    result = await run(environment, "record", str(path), "--for", "100ms", "--namespace", "other")
    assert result == Result(
        0,
        "",
        f"{path}: 0 messages, 0.00 MB\nnothing was heard in namespace other at {nats_server.url}\n",
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/full", "error: /dev/full: cannot be written: No space left on device\n"),
        ("/nowhere/r.ndjson", "error: /nowhere/r.ndjson: cannot be written: No such file or directory\n"),
    ],
)
async def test_a_file_that_cannot_be_written_is_one_clear_line(
    controller: Controller, environment: dict[str, str], path: str, message: str
) -> None:
    """A full disk or an unwritable path: exit 2, never a traceback."""
    assert await run(environment, "record", path) == Result(2, "", message)


async def test_a_disk_that_fills_up_ends_the_recording(
    controller: Controller, environment: dict[str, str], tmp_path: Path
) -> None:
    """Not only at the start: a file-size limit stands for the disk."""
    path = tmp_path / "r.ndjson"
    limited = f"ulimit -f 64; exec {sys.executable} -c '{PROGRAM[2]}' record {path}"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        limited,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert await finish(process) == Result(2, "", f"error: {path}: cannot be written: File too large\n")
    assert path.stat().st_size == 64 * 1024


@pytest.mark.parametrize("content", [b"", b"something else\n"])
async def test_estimate_of_a_foreign_file_is_one_clear_line(
    environment: dict[str, str], tmp_path: Path, content: bytes
) -> None:
    """Exit 2, naming the file."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(content)
    result = await run(environment, "estimate", str(path))
    assert result.status == 2
    assert re.fullmatch(rf"error: {path}: .*not a recording.*\n", result.err)
