"""Decides where a served graph keeps its files, and how other commands find it.

Owns: the per-user folder of run directories, what is written into one before the start, the state file, and
      that all of it goes at the end.
Does not own: the processes.
Invariant: a run directory's name carries the pid of its supervisor; directories of dead ones are ignored, and
           removed by the next graph that starts.
"""

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.mock_model import ensure_mock_model
from dynamo_poa.serve.plan import Plan

_STATE = "state.json"


class RunningGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What other commands need to know of a graph that is being served."""

    namespace: str
    target: str
    pid: int
    nats_url: str
    http_url: str
    metrics_urls: dict[str, str]


def runtime_dir() -> Path:
    """Return the folder of this user's run directories; it need not exist."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "dynamo-poa"
    return Path(tempfile.gettempdir()) / f"dynamo-poa-{os.getuid()}"


def new_run_dir(namespace: str) -> Path:
    """Return the path of a run directory that does not exist yet."""
    return runtime_dir() / f"{namespace}-{os.getpid()}-{secrets.token_hex(3)}"


def create(plan: Plan) -> None:
    """Make the run directory with everything the processes read.

    Raises:  ConfigError when the per-user folder cannot be made or belongs to somebody else.
    """
    parent = plan.run_dir.parent
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError([f"{parent}: {error.strerror} (XDG_RUNTIME_DIR or TMPDIR)"]) from error
    owner = parent.stat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o022:
        raise ConfigError([f"{parent}: must belong to this user alone"])
    _sweep(parent)
    plan.run_dir.mkdir(mode=0o700)
    plan.config_path.write_bytes(msgspec.json.format(msgspec.json.encode(plan.sections)))
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    model = Path(common.model_path)
    if model == plan.run_dir / "model":
        ensure_mock_model(model)
    if model.is_absolute():
        _offer_as_hub_model(plan.run_dir / "hub", common.model_name, model)


def write_state(plan: Plan) -> None:
    """Announce the graph to other commands of this user."""
    state = RunningGraph(
        namespace=plan.namespace,
        target=plan.target,
        pid=os.getpid(),
        nats_url=plan.nats_url,
        http_url=plan.http_url,
        metrics_urls=plan.metrics_urls,
    )
    draft = plan.run_dir / f".{_STATE}"
    draft.write_bytes(msgspec.json.encode(state))
    draft.rename(plan.run_dir / _STATE)


def remove(plan: Plan) -> None:
    """Take away everything `create` and the processes wrote, and the per-user folder when it is empty."""
    shutil.rmtree(plan.run_dir, ignore_errors=True)
    try:
        plan.run_dir.parent.rmdir()
    except OSError:
        return  # another graph of this user is running


def find_running(namespace: str | None = None) -> list[RunningGraph]:
    """Return this user's live graphs, the newest first; of one namespace when given."""
    found = []
    for path in runtime_dir().glob(f"*/{_STATE}"):
        try:
            written_at_s = path.stat().st_mtime
            state = msgspec.json.decode(path.read_bytes(), type=RunningGraph)
        except (OSError, msgspec.DecodeError):
            continue  # going away right now, or not ours
        if is_alive(state.pid) and namespace in (None, state.namespace):
            found.append((written_at_s, state))
    return [state for _, state in sorted(found, key=lambda item: item[0], reverse=True)]


def is_alive(pid: int) -> bool:
    """Tell whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sweep(parent: Path) -> None:
    """Remove run directories whose supervisor was killed before it could."""
    for path in parent.iterdir():
        pid = path.name.rsplit("-", 2)[-2:-1]
        if pid and pid[0].isdecimal() and not is_alive(int(pid[0])):
            shutil.rmtree(path, ignore_errors=True)


def _offer_as_hub_model(cache: Path, name: str, model: Path) -> None:
    """Lay a hub cache out in which `name` is `model`: where a frontend looks for the mock engine's model."""
    entry = cache / f"models--{name.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("local")
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / "local").symlink_to(model)
