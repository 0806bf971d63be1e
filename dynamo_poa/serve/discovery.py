"""Decides how many instances of an endpoint are there, by asking where Dynamo's processes register.

Owns: reading the file backend's folder and etcd's HTTP gateway.
Does not own: what to do with the number.
Invariant: an endpoint is asked for by its whole path; a worker registers further endpoints of its own.
Source: measured on Dynamo 1.4.2: one file per instance under `v1/instances`, named by its percent-encoded key
        `namespace/component/endpoint/id`; etcd holds the same keys.
"""

import base64
from pathlib import Path
from urllib.parse import unquote

import aiohttp

from dynamo_poa.errors import BusError


def count_in_folder(folder: Path, endpoint: str) -> int:
    """Return the number of instances the file backend lists; 0 while the folder does not exist."""
    wanted = endpoint.split(".")
    try:
        names = [entry.name for entry in (folder / "v1" / "instances").iterdir()]
    except FileNotFoundError:
        return 0
    return sum(unquote(name).split("/")[:-1] == wanted for name in names)


async def count_in_etcd(session: aiohttp.ClientSession, url: str, endpoint: str) -> int:
    """Return the number of instances etcd lists.

    Raises:  BusError when etcd does not answer as it should.
    """
    prefix = f"v1/instances/{endpoint.replace('.', '/')}/"
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # etcd's way to ask for a prefix
    request = {"key": _base64(prefix), "range_end": _base64(end), "count_only": True}
    try:
        async with session.post(f"{url}/v3/kv/range", json=request, raise_for_status=True) as response:
            answer = await response.json(content_type=None)
            return int(answer.get("count", 0))  # etcd leaves a zero out
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
        raise BusError(f"etcd at {url}: {error}") from error


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
