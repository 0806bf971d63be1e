"""Supervision of real child processes: order, restarts, ends, and what is left behind (nothing)."""

import asyncio
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import ConfigError, StartError
from dynamo_poa.serve import rundir
from dynamo_poa.serve.child import Child
from dynamo_poa.serve.console import Console
from dynamo_poa.serve.graph import Process, Registered, Stage
from dynamo_poa.serve.plan import Plan
from dynamo_poa.serve.rundir import RunningGraph, find_running, is_alive
from dynamo_poa.serve.supervisor import serve_graph

# What every child may use: `register` makes it ready, `say` writes to a journal the test reads.
PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
root, name = pathlib.Path({root!r}), {name!r}
def say(what):
    with (root / "journal").open("a") as journal: journal.write(f"{{name}} {{what}}\\n")
def register():
    folder = root / "discovery" / "v1" / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"test%2F{{name}}%2Fgenerate%2F1").touch()
"""
SERVE = """
def end(*_):
    say("stopped"); sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("started"); time.sleep({delay}); register(); say("ready")
while True: time.sleep(10)
"""


class QuickClock(SystemClock):
    """The machine's clock, on which every pause is short; it remembers how long they were meant to be."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    async def sleep(self, duration_s: float) -> None:
        self.pauses_s.append(duration_s)
        await super().sleep(min(duration_s, 0.02))


def child(root: Path, name: str, body: str, stage: Stage = Stage.WORKERS) -> Process:
    """Return a process that runs `body` after the prelude and is ready when it calls `register`."""
    script = PRELUDE.format(root=str(root), name=name) + textwrap.dedent(body)
    return Process(
        name=name,
        stage=stage,
        argv=(sys.executable, "-I", "-S", "-c", script),
        ready=Registered(f"test.{name}.generate", 1),
    )


def serving(root: Path, name: str, stage: Stage = Stage.WORKERS, delay_s: float = 0.0) -> Process:
    """Return a process that behaves."""
    return child(root, name, SERVE.format(delay=delay_s), stage)


def plan_of(root: Path, *processes: Process) -> Plan:
    """Return a plan of these processes."""
    return Plan(
        target="graphs.test:Frontend",
        run_dir=root / "runs" / f"poa-{os.getpid()}-abc123",
        sections={"Common": CommonConfig(model_path="org/model")},
        processes=processes,
        env={"FROM_PLAN": "yes"},
        discovery=root / "discovery",
        namespace="poa",
        nats_url="nats://127.0.0.1:1",
        http_url="http://127.0.0.1:2",
    )


def journal(root: Path) -> list[str]:
    """Return what the children have said."""
    return (root / "journal").read_text().splitlines()


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for a condition that real processes will fulfil."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.01)


async def test_stages_start_in_order_when_the_one_before_is_ready_and_stop_in_reverse(tmp_path: Path) -> None:
    """Issue: in order and each awaited by readiness; Ctrl-C stops everything in reverse order."""
    plan = plan_of(
        tmp_path,
        serving(tmp_path, "nats", Stage.NATS, delay_s=0.2),
        serving(tmp_path, "worker", Stage.WORKERS, delay_s=0.2),
        serving(tmp_path, "frontend", Stage.FRONTEND),
    )
    async with serve_graph(plan) as running:
        assert journal(tmp_path) == [
            f"{name} {what}" for name in ("nats", "worker", "frontend") for what in ("started", "ready")
        ]
        pids = [running.process(name).pid for name in ("nats", "worker", "frontend")]
    assert journal(tmp_path)[6:] == ["frontend stopped", "worker stopped", "nats stopped"]
    assert [pid for pid in pids if pid is None or is_alive(pid)] == []
    assert not plan.run_dir.parent.exists()


async def test_a_process_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """Issue: within 10 s, no process left; here within 1 s, as `stop_s` says."""
    deaf = child(
        tmp_path,
        "deaf",
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(subprocess.Popen(["sleep", "60"]).pid); register()
        while True: time.sleep(10)
        """,
    )
    with capture_logs() as logs:
        async with serve_graph(plan_of(tmp_path, deaf), stop_s=1.0) as running:
            pid = running.process("deaf").pid
            grandchild = int(journal(tmp_path)[0].split()[1])
            assert is_alive(grandchild)
            started_at_s = time.monotonic()
    assert 0.9 < time.monotonic() - started_at_s < 3.0
    assert pid is not None
    await until(lambda: not is_alive(pid) and not _runs(grandchild))
    assert [entry for entry in logs if entry["event"] == "poa.process.killed"] == [
        {"event": "poa.process.killed", "log_level": "warning", "processes": ["deaf"]}
    ]


def _runs(pid: int) -> bool:
    """Tell whether a process that is nobody's child here still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_crashed_process_is_restarted_and_said_so(tmp_path: Path) -> None:
    """Issue: a crashed process is restarted with back-off and said so."""
    plan = plan_of(tmp_path, serving(tmp_path, "worker"))
    clock = QuickClock()
    with capture_logs() as logs:
        async with serve_graph(plan, clock=clock) as running:
            first = running.process("worker").pid
            await running.kill("worker")
            await until(lambda: journal(tmp_path).count("worker ready") == 2)
            assert running.process("worker").restarts == 1
            assert running.process("worker").pid not in (None, first)
    (restarted,) = [entry for entry in logs if entry["event"] == "poa.process.restarted"]
    assert restarted.pop("up_s") >= 0
    assert restarted == {
        "event": "poa.process.restarted",
        "log_level": "warning",
        "process": "worker",
        "status": -9,
        "backoff_s": 0.5,
        "restarts": 1,
    }
    assert 0.5 in clock.pauses_s


async def test_a_process_that_has_ended_leaves_discovery_before_it_is_started_again(tmp_path: Path) -> None:
    """Issue 4: Dynamo itself would list it for 7 to 10 s more; what listens still is another's."""

    def record(port: int, number: int) -> Path:
        path = tmp_path / "discovery" / "v1" / "instances" / f"poa%2Fbackend%2Fgenerate%2F{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        transport = {"tcp": f"127.0.0.1:{port}/{number}/generate"}
        path.write_text(json.dumps({"instance_id": number, "transport": transport}))
        return path

    plan = plan_of(tmp_path, serving(tmp_path, "worker"))
    with (
        capture_logs() as logs,
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket() as silent,
    ):
        silent.bind(("127.0.0.1", 0))
        async with serve_graph(plan, clock=QuickClock()) as running:
            live = record(listening.getsockname()[1], 1)
            dead = record(silent.getsockname()[1], 2)
            await running.kill("worker")
            await until(lambda: journal(tmp_path).count("worker ready") == 2)
            assert (live.exists(), dead.exists()) == (True, False)
    names = [entry["event"] for entry in logs]
    assert names.index("poa.records.removed") < names.index("poa.process.restarted")
    assert [entry["records"] for entry in logs if entry["event"] == "poa.records.removed"] == [
        ["v1/instances/poa/backend/generate/2"]
    ]


class StepClock(QuickClock):
    """A clock on which each run of a process seems to last as long as told."""

    def __init__(self, runs_s: list[float], then: Callable[[], None]) -> None:
        super().__init__()
        self._instants = iter([instant for run_s in runs_s for instant in (0.0, run_s)])
        self._left, self._then = len(runs_s), then

    def monotonic_s(self) -> float:
        return next(self._instants)

    async def sleep(self, duration_s: float) -> None:
        await super().sleep(duration_s)
        self._left -= 1
        if not self._left:
            self._then()


async def test_backoff_doubles_to_ten_seconds_and_begins_anew_after_thirty(
    tmp_path: Path,
) -> None:
    """Back-off 0.5 s to 10 s, reset after 30 s up."""
    kept: list[Child] = []
    clock = StepClock([1, 1, 1, 1, 1, 29.9, 1, 30.0, 1], then=lambda: kept[0].stop())
    kept.append(Child(child(tmp_path, "brief", "pass"), {}, lambda name, line: None, clock))
    kept[0].ready = True
    await kept[0].keep()
    assert clock.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 1.0]
    assert kept[0].restarts == 9


async def test_a_process_that_keeps_crashing_before_it_is_ready_ends_the_start(tmp_path: Path) -> None:
    """More than 3 crashes: stop all and say the last lines."""
    plan = plan_of(
        tmp_path,
        serving(tmp_path, "nats", Stage.NATS),
        child(tmp_path, "broken", "print('no such model', flush=True); sys.exit(3)"),
    )
    with pytest.raises(StartError) as caught:
        async with serve_graph(plan, clock=QuickClock()):
            pytest.fail("must not come up")
    assert str(caught.value) == (
        "broken ended 4 times before it was ready, last with status 3; it said:" + "\n  no such model" * 4
    )
    assert journal(tmp_path) == ["nats started", "nats ready", "nats stopped"]
    assert not plan.run_dir.exists()


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """Errors are clear: the path and what the system says of it."""
    spec = Process(
        name="gone", stage=Stage.NATS, argv=("/no/such/program",), ready=Registered("test.gone.generate", 1)
    )
    with pytest.raises(StartError, match="/no/such/program: No such file or directory"):
        async with serve_graph(plan_of(tmp_path, spec), clock=QuickClock()):
            pytest.fail("must not come up")


async def test_a_start_that_takes_too_long_says_what_is_missing(tmp_path: Path) -> None:
    """The start timeout is configurable, with a clear error."""
    plan = plan_of(
        tmp_path,
        child(tmp_path, "slow", "print('loading', flush=True); time.sleep(60)"),
        serving(tmp_path, "quick"),
    )
    with pytest.raises(StartError) as caught:
        async with serve_graph(plan, start_timeout_s=1.0):
            pytest.fail("must not come up")
    assert str(caught.value) == (
        "not up after 1 s (--start-timeout):\n"
        "slow: 0 of 1 instances of test.slow.generate registered; last lines:\n"
        "  slow | loading"
    )


STUCK_ONCE = """
first = not (root / "tried").exists()
(root / "tried").touch()
if first: say("stuck"); time.sleep(60)
"""


async def test_a_frontend_that_is_stuck_is_started_anew_and_a_slow_worker_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once in 75 starts: a frontend that never lists its model. A worker may be loading one."""
    monkeypatch.setattr("dynamo_poa.serve.supervisor.STUCK_S", 1.5)
    slow = serving(tmp_path, "slow", delay_s=2.0)
    frontend = child(tmp_path, "frontend", STUCK_ONCE + SERVE.format(delay=0.0), Stage.FRONTEND)
    with capture_logs() as logs:
        async with serve_graph(plan_of(tmp_path, slow, frontend), start_timeout_s=20) as running:
            assert running.process("slow").restarts == 0
            assert running.process("frontend").restarts == 1
    assert [line["process"] for line in logs if line["event"] == "poa.process.stuck"] == ["frontend"]


async def test_cancelling_during_the_start_stops_what_has_been_started(tmp_path: Path) -> None:
    """Ctrl-C also works while the graph comes up."""
    plan = plan_of(
        tmp_path,
        serving(tmp_path, "nats", Stage.NATS),
        child(tmp_path, "slow", "say(os.getpid()); time.sleep(60)"),
    )

    async def serve() -> None:
        async with serve_graph(plan):
            pytest.fail("must not come up")

    task = asyncio.create_task(serve())
    await until(lambda: (tmp_path / "journal").exists() and len(journal(tmp_path)) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert journal(tmp_path)[3:] == ["nats stopped"]
    assert not is_alive(int(journal(tmp_path)[2].split()[1]))
    assert not plan.run_dir.exists()


async def test_a_second_cancellation_does_not_cut_the_clean_up_short(tmp_path: Path) -> None:
    """An impatient second Ctrl-C leaves no process behind either."""
    lingering = child(
        tmp_path,
        "lingering",
        """
        def end(*_):
            say("stopping"); time.sleep(0.5); say("stopped"); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        register()
        while True: time.sleep(10)
        """,
    )
    plan = plan_of(tmp_path, lingering)
    up = asyncio.Event()

    async def serve() -> None:
        async with serve_graph(plan) as running:
            up.set()
            await running.wait()

    task = asyncio.create_task(serve())
    await up.wait()
    task.cancel()
    await until(lambda: (tmp_path / "journal").exists())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert journal(tmp_path) == ["lingering stopping", "lingering stopped"]
    assert not plan.run_dir.exists()


async def test_stopping_does_not_wait_for_a_pending_restart(tmp_path: Path) -> None:
    """A process in back-off has nothing to stop."""
    plan = plan_of(tmp_path, child(tmp_path, "brief", "register(); time.sleep(0.2); sys.exit(1)"))
    async with serve_graph(plan) as running:
        await until(lambda: running.process("brief").restarts == 2)
        await until(lambda: running.process("brief").pid is None)
        started_at_s = time.monotonic()
    assert time.monotonic() - started_at_s < 0.5


async def test_output_arrives_line_by_line_whatever_its_length(tmp_path: Path) -> None:
    """Huge lines come in pieces, bytes that are no UTF-8 are shown, the last line needs no newline."""
    lines: list[tuple[str, str]] = []
    talker = child(
        tmp_path,
        "talker",
        r"""
        out = sys.stdout.buffer
        out.write(b"one\r\ntwo \xff\n" + b"x" * 1_000_000 + b"\nerr next\n"); out.flush()
        sys.stderr.write(os.environ["FROM_PLAN"]); sys.stderr.flush()
        register(); signal.pause()
        """,
    )
    async with serve_graph(plan_of(tmp_path, talker), emit=lambda name, line: lines.append((name, line))):
        await until(lambda: ("talker", "err next") in lines)
    assert {name for name, _ in lines} == {"talker"}
    texts = [line for _, line in lines]
    assert texts[:2] == ["one", "two \ufffd"]
    assert texts[-2:] == ["err next", "yes"]
    assert "".join(texts[2:-2]) == "x" * 1_000_000
    assert max(map(len, texts)) <= 2 * 65_536


async def test_a_graph_is_found_while_it_runs_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other commands find a graph through its state file, of this user, by namespace."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    plan = plan_of(tmp_path, serving(tmp_path, "nats", Stage.NATS))
    plan = msgspec.structs.replace(plan, run_dir=rundir.new_run_dir("poa"))
    assert plan.run_dir.parent == tmp_path / "dynamo-poa"
    async with serve_graph(plan) as running:
        graph = RunningGraph(
            namespace="poa",
            target="graphs.test:Frontend",
            pid=os.getpid(),
            nats_url="nats://127.0.0.1:1",
            http_url="http://127.0.0.1:2",
            metrics_urls={},
        )
        assert find_running() == find_running("poa") == [graph]
        assert find_running("other") == []
        assert (running.http_url, running.nats_url) == (graph.http_url, graph.nats_url)
        assert oct(plan.run_dir.stat().st_mode & 0o777) == "0o700"
    assert find_running() == []


def dead_pid() -> int:
    """Return the pid of a process that has ended."""
    with subprocess.Popen(["true"]) as gone:
        return gone.pid


async def test_directories_of_dead_supervisors_are_swept_and_live_ones_kept(tmp_path: Path) -> None:
    """A supervisor killed outright leaves files; the next one removes them, and only those."""
    dead = tmp_path / "runs" / f"my-graph-{dead_pid()}-0a1b2c"
    alive = tmp_path / "runs" / f"poa-{os.getppid()}-0a1b2c"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        folder.parent.chmod(0o700)
    async with serve_graph(plan_of(tmp_path, serving(tmp_path, "nats", Stage.NATS))):
        assert not dead.exists()
    assert alive.exists()


async def test_a_folder_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """The folder lies in a shared place: somebody else's must not be trusted."""
    plan = plan_of(tmp_path, serving(tmp_path, "nats", Stage.NATS))
    plan.run_dir.parent.mkdir()
    plan.run_dir.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        async with serve_graph(plan):
            pytest.fail("must not come up")


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """Also when the supervisor cannot clean up: prctl(2), PR_SET_PDEATHSIG."""
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_supervisor import plan_of, serving
        from dynamo_poa.serve.supervisor import serve_graph
        async def main():
            root = Path({str(tmp_path)!r})
            async with serve_graph(plan_of(root, serving(root, "worker"))) as running:
                print(running.process("worker").pid, flush=True)
                await running.wait()
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(next(line for line in supervisor.stdout if line.strip().isdecimal()))
        assert _runs(pid)
        supervisor.kill()
    deadline_s = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _runs(pid)


def test_console_lines_carry_the_name_of_their_process() -> None:
    """Output of all processes is prefixed and interleaved."""
    stream = io.StringIO()
    console = Console(stream, ["nats", "frontend"])
    console.line("nats", "Server is ready")
    console.line("frontend", "")
    assert stream.getvalue() == "nats     | Server is ready\nfrontend | \n"


def test_console_names_are_coloured_on_a_terminal_only() -> None:
    """Each name has its own colour."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(stream, ["a", "b"])
    console.line("a", "x")
    console.line("b", "y")
    assert stream.getvalue() == "\x1b[36ma |\x1b[0m x\n\x1b[33mb |\x1b[0m y\n"


def test_a_reader_that_went_away_does_not_stop_the_graph() -> None:
    """`dynamo serve ... | head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    console = Console(stream, ["a"])
    console.line("a", "x")
    console.line("a", "y")
    assert console._stream is None  # given up, and nothing raised
    with contextlib.suppress(BrokenPipeError):
        stream.close()
