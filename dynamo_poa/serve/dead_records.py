"""Decides which of discovery's records are those of a dead process, and takes them out of the file backend.

Owns: telling a dead listener's records; removing them, and the cards and event sources of their instances.
Does not own: noticing that a process has ended (child.py), etcd and Kubernetes, which know by themselves.
Invariant: a live process's record is never removed: it goes only when its own address refuses a connection,
           and a process listens before it registers and until it has left. What belongs to no instance (event
           channels) is left to Dynamo, which removes it 10 s after its owner's last sign of life.
Source: measured on ai-dynamo 1.4.2: a process killed outright stays listed for 7 to 10 s, and all that time
        frontends and routers choose it like a live one, more often even; a removal is followed within 50 ms.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dynamo_poa.values import Address

CONNECT_S = 0.5  # who does not answer in time is not refusing: its queue of connections is full

Refuses = Callable[[str, int], bool]


def refuses(host: str, port: int) -> bool:
    """Tell whether nobody listens there; False on any doubt."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def remove_dead_records(root: Path, refused: Refuses = refuses) -> tuple[str, ...]:
    """Take out of discovery's folder what belongs to instances that nobody serves any more.

    Returns:  the keys removed, such as `v1/instances/poa/backend/generate/5afa93872e6b6bfa`.
    """
    return await asyncio.to_thread(_remove, root, refused)


def _remove(root: Path, refused: Refuses) -> tuple[str, ...]:
    instances = [(path, record) for path, record in _records(root / "v1" / "instances") if _tcp(record)]
    dead_listeners = {at for at in {_tcp(record) for _, record in instances} if at and refused(*at)}
    gone = [(path, record) for path, record in instances if _tcp(record) in dead_listeners]
    alive = {record.get("instance_id") for _, record in instances if _tcp(record) not in dead_listeners}
    ids = {record.get("instance_id") for _, record in gone} - alive
    files = [path for path, _ in gone]
    files += [p for p, record in _records(root / "v1" / "mdc") if record.get("instance_id") in ids]
    files += [p for p, record in _records(root / "v1" / "event_sources") if _worker_id(record) in ids]
    removed = []
    for path in files:
        with contextlib.suppress(OSError):  # its time was up, or it is for Dynamo to remove
            path.unlink()
            removed.append(unquote(path.relative_to(root).as_posix()))
    return tuple(removed)


def _records(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the records that can be read; one that cannot is nobody's to remove."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue  # not ready
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_bytes())
                if isinstance(record, dict):
                    yield path, record


def _tcp(record: dict[str, Any]) -> tuple[str, int] | None:
    """Return where an instance listens, None when that is not over tcp or not understood."""
    transport = record.get("transport")
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        address = Address.parse(transport["tcp"])  # type: ignore[index]
        return address.host, address.port
    return None


def _worker_id(record: dict[str, Any]) -> object:
    """Return whose events a source gives."""
    try:
        return record["metadata"]["worker"]["worker_id"]
    except (KeyError, TypeError):
        return None
