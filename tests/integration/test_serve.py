"""A graph of real processes: NATS, mock workers, the unmodified frontend; served, asked, stopped."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from dynamo_poa.serve.discovery import count_in_folder
from dynamo_poa.serve.mock_model import vocabulary_words
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.rundir import find_running
from dynamo_poa.serve.supervisor import serve_graph

pytestmark = pytest.mark.dynamo

GRAPH = """
from components.frontend import Frontend
from components.worker import Worker
Frontend.link(Worker)
"""
REQUEST = {
    "model": "mock-llama-3.1-70b",
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 5,
    "stream": True,
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A graph without a router, below the current directory: its workers are the frontend's own."""
    name = f"plain_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return f"{name}:Frontend"


def processes_of(run_dir: Path) -> list[str]:
    """Return command lines of processes that name a run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if str(run_dir).encode() in command + environment and int(path.name) != os.getpid():
            found.append(command.decode().replace("\0", " "))
    return found


def registered_since(before: set[Path], discovery: Path) -> bool:
    """Tell whether a worker has registered that was not there before."""
    return any("generate" in path.name for path in set((discovery / "v1" / "instances").iterdir()) - before)


async def streamed_words(url: str) -> list[str]:
    """Ask for a chat completion and return the text of each chunk that has one."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/chat/completions", json=REQUEST, raise_for_status=True) as response,
    ):
        lines = [line.decode().strip() async for line in response.content]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    texts = [choice["delta"].get("content") for chunk in chunks for choice in chunk.get("choices", [])]
    return [text.strip() for text in texts if text]


async def test_a_served_graph_streams_text_heals_and_leaves_nothing(target: str) -> None:
    """Issue: `curl` streams text; a crashed process is restarted; nothing is left running, nor any file."""
    lines: list[tuple[str, str]] = []
    plan = make_plan(
        target, overrides=["Worker.workers=2", "Frontend.http_port=0", "Worker.args.speedup-ratio=10"]
    )
    assert isinstance(plan.discovery, Path)
    with capture_logs() as logs:
        async with serve_graph(plan, emit=lambda name, line: lines.append((name, line))) as running:
            assert count_in_folder(plan.discovery, "poa.backend.generate") == 2
            words = await streamed_words(running.http_url)
            assert len(words) == 5
            assert set(words) <= set(vocabulary_words())
            assert [graph.http_url for graph in find_running("poa")] == [running.http_url]

            before = set((plan.discovery / "v1" / "instances").iterdir())
            await running.kill("worker-0")
            async with asyncio.timeout(20):
                while not registered_since(before, plan.discovery):  # noqa: ASYNC110 - a process, no event
                    await asyncio.sleep(0.05)
            assert running.process("worker-0").restarts == 1
            assert len(await streamed_words_of_a_live_worker(running.http_url)) == 5
            stopping_at_s = time.monotonic()
    assert time.monotonic() - stopping_at_s < 10
    assert processes_of(plan.run_dir) == []
    assert not plan.run_dir.exists()
    assert find_running() == []
    assert ("nats", "Server is ready") in [(name, line.split("[INF] ")[-1]) for name, line in lines]
    assert [log["process"] for log in logs if log["event"] == "poa.process.ready"] == [
        *("nats", "worker-0", "worker-1", "frontend")
    ]
    assert [log["process"] for log in logs if log["event"] == "poa.process.restarted"] == ["worker-0"]


async def streamed_words_of_a_live_worker(url: str) -> list[str]:
    """Ask until an answer comes: a killed worker stays listed up to 10 s (dynamo-facts 2)."""
    async with asyncio.timeout(20):
        while True:
            try:
                if words := await streamed_words(url):
                    return words
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_everything_it_started(
    target: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Issue: Ctrl-C or SIGTERM stops everything within 10 s in reverse order."""
    command = [str(Path(sys.executable).parent / "dynamo"), "serve", target, "--Frontend.http_port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        seen: list[str] = []
        for line in server.stdout:
            seen.append(line)
            if re.match(r"serve +\| ready: http://127\.0\.0\.1:\d+/v1/chat/completions", line):
                break
        (run_dir,) = (tmp_path / "dynamo-poa").iterdir()
        assert len(processes_of(run_dir)) == 3
        asked_at_s = time.monotonic()
        server.send_signal(number)
        seen += server.stdout.readlines()
        assert server.wait(timeout=10) == 0
    assert time.monotonic() - asked_at_s < 10
    assert [line.split("|")[1].strip() for line in seen if line.startswith("serve")][1:] == [
        "stopping",
        "stopped",
    ]
    assert processes_of(run_dir) == []
    assert not (tmp_path / "dynamo-poa").exists()


def test_a_signal_during_the_start_ends_it_too(target: str, tmp_path: Path) -> None:
    """Issue: nothing left running, whenever it is stopped."""
    command = [str(Path(sys.executable).parent / "dynamo"), "serve", target, "--Frontend.http_port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        next(line for line in server.stdout if "Server is ready" in line)
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(timeout=10) == 0
    assert rest.endswith("| stopped\n")
    assert "ready: http" not in rest
    assert not (tmp_path / "dynamo-poa").exists()
