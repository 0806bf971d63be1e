"""Decides which of discovery's records are those of a dead process, and takes them out of the file backend.

Owns: telling a dead listener's records; removing them, and the cards and event sources of their instances.
Does not own: noticing that a process has ended (child.py), etcd and Kubernetes, which know by themselves.
Invariant: a live process's record is never removed: it goes only when its own address refuses a connection
           after it was read, and a process listens before it registers and until it has left. Only this
           machine's loopback tells that for sure, and `dynamo serve` puts all there: a refusal from elsewhere
           may be a firewall's. What belongs to no instance (event channels) is left to Dynamo, which removes
           it 10 s after its owner's last sign of life.
Source: measured on ai-dynamo 1.4.2: a process killed outright stays listed for 7 to 10 s, and all that time
        frontends and routers choose it like a live one, more often even; a removal is followed within 50 ms.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from dynamo_poa.values import Address

CONNECT_S = 0.5  # who does not answer in time is not refusing: its queue of connections is full

Refuses = Callable[[str, int], bool]


class _Record(NamedTuple):
    path: Path
    text: bytes
    fields: dict[str, Any]


def refuses(host: str, port: int) -> bool:
    """Tell whether nobody listens there; False on any doubt."""
    try:
        if ipaddress.ip_address(host).is_loopback:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # a name may stand for several addresses
        return False
    return False


async def remove_dead_records(root: Path, refused: Refuses = refuses) -> tuple[str, ...]:
    """Take out of discovery's folder what belongs to instances that nobody serves any more.

    Returns:  the keys removed, such as `v1/instances/poa/backend/generate/5afa93872e6b6bfa`.
    """
    return await asyncio.to_thread(_remove, root, refused)


def _remove(root: Path, refused: Refuses) -> tuple[str, ...]:
    instances = list(_records(root / "v1" / "instances"))
    listeners = dict.fromkeys(at for at in map(_tcp, instances) if at is not None)
    dead = {at for at in listeners if refused(*at)}
    gone = [record for record in instances if _tcp(record) in dead]
    alive = {_instance_id(record) for record in instances if _tcp(record) not in dead}
    ids = {_instance_id(record) for record in gone} - alive - {None}
    gone += [record for record in _records(root / "v1" / "mdc") if _instance_id(record) in ids]
    gone += [record for record in _records(root / "v1" / "event_sources") if _worker_id(record) in ids]
    removed = []
    for path, text, _ in gone:
        with contextlib.suppress(OSError):  # its time was up, or it is for Dynamo to remove
            if path.read_bytes() == text:  # or it points elsewhere by now
                path.unlink()
                removed.append(unquote(path.relative_to(root).as_posix()))
    return tuple(removed)


def _records(folder: Path) -> Iterator[_Record]:
    """Yield the records that can be read; one that cannot is nobody's to remove."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(folder.iterdir())
    for path in paths:
        if path.name.startswith("."):
            continue  # not ready
        with contextlib.suppress(OSError, ValueError):
            text = path.read_bytes()
            fields = json.loads(text)
            if isinstance(fields, dict):
                yield _Record(path, text, fields)


def _tcp(record: _Record) -> tuple[str, int] | None:
    """Return where an instance listens, None when that is not over tcp or not understood."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        address = Address.parse(record.fields["transport"]["tcp"])
        return address.host, address.port
    return None


def _instance_id(record: _Record) -> int | None:
    """Return whose record it is, None when it does not say."""
    found = record.fields.get("instance_id")
    return found if isinstance(found, int) else None


def _worker_id(record: _Record) -> int | None:
    """Return whose events a source gives, None when it does not say."""
    with contextlib.suppress(KeyError, TypeError):
        found = record.fields["metadata"]["worker"]["worker_id"]
        return found if isinstance(found, int) else None
    return None
