"""Decides which processes serve a graph: command lines, environment, ports, where their files lie.

Owns: the plan, its text, and the environment every process of a graph shares.
Does not own: an engine's or component's own flags (`components/`), starting anything (supervisor.py).
Invariant: a pure function of configuration, run directory and ports; what `--dry-run` prints is what runs.
Source: measured on Dynamo 1.4.2: without DYN_EVENT_PLANE=nats the file backend silently uses ZMQ; a loopback
        graph needs an address in DYN_TCP_RPC_HOST and an interface in DYN_TCP_RESPONSE_STREAM_HOST; the mock
        engine's model card points to the hub, so a frontend must find the model's name in a hub cache.
"""

import os
import random
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import yaml

from components.frontend import base_url
from dynamo_poa.config import CommonConfig, ControllerConfig, FrontendConfig, RouterConfig, Section
from dynamo_poa.serve.graph import HttpOk, NatsReady, Process, Site, Stage
from dynamo_poa.serve.resolve import Configuration

# What people should not have to read: each key that is gone already when a process stops, each worker that
# comes, models without pictures, a name looked up on the hub. `storage::kv` says ERROR at every stop, often.
_QUIET_TARGETS = (
    "dynamo_kv_router::sequences::multi_worker",
    "dynamo_runtime::pipeline::network::egress::push_router",
    "mm_routing",
    "dynamo_llm::entrypoint::input::endpoint",
    "dynamo_runtime::component::endpoint",
    "dynamo_runtime::transports::event_plane",
    "dynamo_llm::kv_router::publisher",
    "dynamo_llm::hub",
    "modelexpress_common",
)
_LOG_FILTER = ",".join(["warn", *(f"{t}=error" for t in _QUIET_TARGETS), "dynamo_runtime::storage::kv=off"])


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A graph, ready to be served.

    sections:   the resolved configuration: ports chosen, paths absolute, URLs filled in
    processes:  in the order they start
    env:        what every process gets
    discovery:  where instances are listed: a folder, an etcd URL, or empty when it cannot be asked
    """

    target: str
    run_dir: Path
    sections: dict[str, Section]
    processes: tuple[Process, ...]
    env: dict[str, str]
    discovery: Path | str
    namespace: str
    nats_url: str
    http_url: str

    @property
    def log_level(self) -> str:
        """Return how much our own processes say."""
        common = self.sections["Common"]
        assert isinstance(common, CommonConfig)
        return common.log_level

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Return the /metrics address of each of our own processes, by process name."""
        return {
            process.name: process.ready.url.removesuffix("/health") + "/metrics"
            for process in self.processes
            if isinstance(process.ready, HttpOk)
        }

    @property
    def config_path(self) -> Path:
        """Return the file our own processes read the resolved configuration from."""
        return self.run_dir / "config.json"

    def text(self) -> str:
        """Return the plan as `--dry-run` prints it: configuration, environment, command lines in order."""
        lines = [
            f"# {self.target}, resolved",
            _yaml(self.sections).rstrip(),
            "",
            "# environment of every process",
        ]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        for number, process in enumerate(self.processes, start=1):
            lines += ["", f"# {number}. {process.name}"]
            lines.append(shlex.join([*(f"{k}={v}" for k, v in process.env.items()), *process.argv]))
        return "\n".join(lines) + "\n"


class FreePorts:
    """Hands out ports nobody listens on, each once.

    They lie below the range the kernel takes outgoing connections' ports from, so that none is lost to such a
    connection between the choice and the listening.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._given: set[int] = set()

    def __call__(self, count: int) -> int:
        """Return the first of `count` consecutive free ports."""
        while True:
            first = self._chance.randrange(20_000, 32_000)
            wanted = range(first, first + count)
            if self._given.isdisjoint(wanted) and all(map(port_is_free, wanted)):
                self._given.update(wanted)
                return first


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Tell whether a server could listen there now.

    Raises:  socket.gaierror when the host is no address of any machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            raise
        except OSError:
            return False
    return True


def local_model(common: CommonConfig) -> Path | None:
    """Return the absolute model directory, None where `model_path` is `mock` or a name on the hub."""
    path = Path(common.model_path).expanduser()
    hub_name = common.model_path.count("/") == 1 and common.model_path[0] not in "/.~"
    if common.model_path == "mock" or (hub_name and not path.exists()):
        return None
    return path.resolve()


def nats_server() -> str | None:
    """Return the path of the `nats-server` binary: this interpreter's, or one on the PATH."""
    return shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


def lay_out(
    configuration: Configuration,
    run_dir: Path,
    ports: Callable[[int], int],
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Lay out the processes of a valid configuration.

    Args:     run_dir: need not exist.  ports: hands out the first of so many consecutive free ports.
              environ: what the processes inherit; only DYN_LOG is looked at.
    """
    common = configuration.common
    embedded_port = ports(1) if common.nats_url == "embedded" else None
    nats_url = f"nats://127.0.0.1:{embedded_port}" if embedded_port else common.nats_url
    model = run_dir / "model" if common.model_path == "mock" else local_model(common)
    common = msgspec.structs.replace(
        common, nats_url=nats_url, model_path=str(model) if model else common.model_path
    )
    sections = _fill_in(configuration, common, ports)
    site = Site(
        common=common,
        config_path=run_dir / "config.json",
        exposed=configuration.exposed,
        bootstrap=configuration.bootstrap,
        ports=ports,
    )
    processes = [_embedded_nats(embedded_port, nats_url, run_dir)] if embedded_port else []
    for component in configuration.graph.components:
        processes += component.processes(sections[component.name], site)
    frontend = next(section for section in sections.values() if isinstance(section, FrontendConfig))
    discovery: Path | str = ""
    if common.discovery == "file":
        discovery = run_dir / "discovery"
    elif common.discovery.startswith("etcd://"):
        discovery = "http://" + common.discovery.removeprefix("etcd://")
    return Plan(
        target=configuration.graph.target,
        run_dir=run_dir,
        sections=sections,
        processes=tuple(sorted(processes, key=lambda process: process.stage)),
        env=_environment(common, run_dir, discovery, environ),
        discovery=discovery,
        namespace=common.namespace,
        nats_url=nats_url,
        http_url=base_url(frontend),
    )


def _fill_in(
    configuration: Configuration, common: CommonConfig, ports: Callable[[int], int]
) -> dict[str, Section]:
    """Choose what the configuration left open: ports, and where the controller finds the frontend."""
    sections = {**configuration.sections, "Common": common}
    url = ""
    for name, section in sections.items():
        if isinstance(section, FrontendConfig):
            frontend = msgspec.structs.replace(section, http_port=section.http_port or ports(1))
            sections[name], url = frontend, base_url(frontend)
    for name, section in sections.items():
        if isinstance(section, RouterConfig):
            first = section.metrics_port or ports(section.replicas)
            policy = section.policy_config and str(Path(section.policy_config).expanduser().resolve())
            sections[name] = msgspec.structs.replace(section, metrics_port=first, policy_config=policy)
        if isinstance(section, ControllerConfig):
            sections[name] = msgspec.structs.replace(
                section,
                metrics_port=section.metrics_port or ports(1),
                frontend_url=section.frontend_url or url,
            )
    return sections


def _environment(
    common: CommonConfig, run_dir: Path, discovery: Path | str, environ: Mapping[str, str]
) -> dict[str, str]:
    env = {
        "DYN_EVENT_PLANE": "nats",
        "DYN_REQUEST_PLANE": "tcp",
        "NATS_SERVER": common.nats_url,
        "DYN_SELF_HOST_METADATA": "0",
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "1",
        "DYN_LOG": environ.get("DYN_LOG") or _LOG_FILTER,
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if isinstance(discovery, Path):
        env |= {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(discovery),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        }
    elif discovery:
        env |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": discovery}
    else:
        env["DYN_DISCOVERY_BACKEND"] = common.discovery
    if Path(common.model_path).is_absolute():
        env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(run_dir / "hub")}
    return env


def _embedded_nats(port: int, url: str, run_dir: Path) -> Process:
    return Process(
        name="nats",
        stage=Stage.NATS,
        argv=(
            nats_server() or "nats-server",
            *(
                "--addr",
                "127.0.0.1",
                "--port",
                str(port),
                "--jetstream",
                "--store_dir",
                str(run_dir / "nats"),
            ),
        ),
        ready=NatsReady(url),
    )


def _yaml(sections: Mapping[str, Section]) -> str:
    return yaml.safe_dump(msgspec.to_builtins(dict(sections)), sort_keys=False, allow_unicode=True)
