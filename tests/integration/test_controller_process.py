"""The controller as a process: starts, answers, takes an operator's word, stops; no workers, no routers."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import yaml
from nats_server import NatsServer, free_port

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.params import KEY, bucket, decode_params
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Mode, ParamsKind, Regime

pytestmark = pytest.mark.dynamo

NAMESPACE = "controller-test"


@asynccontextmanager
async def controller(tmp_path, nats_url, port, **settings):
    """Run the process and kill it by handle if it is still there at the end."""
    config = tmp_path / "config.yaml"
    sections = {
        "Common": {"namespace": NAMESPACE},
        "PoaController": {"metrics_port": port, **settings},
    }
    config.write_text(yaml.safe_dump(sections))
    env = os.environ | {
        "NATS_SERVER": nats_url,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_EVENT_PLANE": "nats",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "components.poa_controller", "--config", str(config)),
        env=env,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def status_of(port):
    """Return what /health answers, None while nobody listens."""
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{port}/health") as answer,
        ):
            return answer.status
    except aiohttp.ClientError:
        return None


async def until(wanted, ask, within_s=20.0):
    """Ask again and again until the answer is as wanted."""
    async with asyncio.timeout(within_s):
        while await ask() != wanted:  # noqa: ASYNC110  another process: there is no event to wait for
            await asyncio.sleep(0.05)


async def test_a_controller_alone_is_ready_takes_a_pin_and_leaves_on_sigterm(tmp_path, nats_server):
    """/health 200, heartbeats' record in the store, control service, telemetry, exit code 0."""
    port = free_port()
    told: list[TelemetryRecord] = []
    async with (
        controller(tmp_path, nats_server.url, port) as process,
        Bus(nats_server.url, name="operator", clock=SystemClock()) as bus,
    ):
        bus.subscribe(
            f"poa.{NAMESPACE}.telemetry",
            lambda _, data: told.append(msgspec.msgpack.decode(data, type=TelemetryRecord)),
        )
        await until(200, lambda: status_of(port))
        await bus.wait_connected(5)

        async def stored():
            entry = await bus.kv_get(bucket(NAMESPACE), KEY)
            params = decode_params(entry.value)
            return params.router_temperature, params.overlap_weight, params.kind

        assert await stored() == (0.0, 1.0, ParamsKind.POLICY)
        command = {"op": "set", "router_temperature": 0.3, "overlap_weight": 0.4, "for_s": None}
        answer = await bus.request(f"poa.{NAMESPACE}.control", json.dumps(command).encode(), 2.0)
        assert json.loads(answer)["ok"] is True
        await until((0.3, 0.4, ParamsKind.PIN), stored)
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{port}/metrics") as metrics,
        ):
            text = await metrics.text()
        assert "poa_router_temperature 0.3\n" in text
        assert "NaN" not in text
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
    assert told[-1].regime is Regime.BELOW
    assert (told[-1].mode, told[-1].kind, told[-1].poa_hat) == (Mode.ACTIVE, ParamsKind.PIN, None)
    ours = [json.loads(line) for line in errors.decode().splitlines() if line.startswith("{")]
    assert {line["event"] for line in ours} >= {
        "poa.controller.started",
        "poa.tick",
        "poa.controller.stopped",
    }


async def test_a_controller_without_nats_waits_and_is_not_ready(tmp_path):
    """I1, third run: 503 until there is NATS, no exit; SIGTERM still ends it with 0."""
    port = free_port()
    with NatsServer(tmp_path / "nats") as server:
        url = server.url
    async with controller(tmp_path, url, port) as process:
        await until(503, lambda: status_of(port))
        await asyncio.sleep(0.5)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_bad_configuration_is_told_all_at_once_with_exit_code_2(tmp_path, nats_server):
    """Key, value and bound; no traceback."""
    async with controller(tmp_path, nats_server.url, 0, tick_s=0, mode="on") as process:
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert "PoaController.tick_s = 0: must be in [0.05, 60]" in errors.decode()
    assert "PoaController.mode = 'on': must be one of off, shadow, active" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_a_port_in_use_is_told_with_exit_code_2(tmp_path, nats_server):
    """O1: the second of two on one port fails at once and names it."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with controller(tmp_path, nats_server.url, port) as process:
            _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert f"PoaController.metrics_port = {port}: must be a free port on 127.0.0.1" in errors.decode()
