"""Decides where discovery sends requests for an endpoint of ours: to Dynamo's own listener or to the relay.

Owns: finding our own instance's record, replacing `transport.tcp`'s host and port in it, putting back what
      was there; saying why a discovery does not allow it.
Does not own: when to do so, or what listens at the address.
Invariant: a record that has gone is never brought back; only `transport.tcp` ever differs from what Dynamo
           wrote, and other processes see the old record or the new one, whole.
Source: measured on ai-dynamo 1.4.2. Files: a Client and a frontend (kv) send to the new address
        1-2 ms after the rename, without a failed request under load (eight switches, 5572 requests); the
        owner's touching and its removal at the end go by name and take the new file; Dynamo skips files
        named `.tmp_*` and removes old ones. etcd 3.4.23: followed in 4-9 ms; the record keeps its lease, so
        it still ends with its owner.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import aiohttp
import structlog

from dynamo_poa.clock import Clock
from dynamo_poa.errors import RecordUnchangeable
from dynamo_poa.values import Address

log = structlog.get_logger(__name__)

BUCKET = "v1/instances"
POLL_S = 0.02
ETCD_TIMEOUT_S = 3.0
ATTEMPTS = 3  # at replacing a record that somebody else has replaced in the same moment


class Kept(NamedTuple):
    """A record as a store holds it.

    revision, lease:  etcd's, as the text its JSON gateway writes 64-bit numbers in; empty in files
    """

    value: bytes
    revision: str = ""
    lease: str = ""


class Store(Protocol):
    """Where discovery keeps records: in files, or in etcd."""

    async def read(self, key: str) -> Kept | None:
        """Return the record now, None when there is none."""
        ...

    async def replace(self, key: str, old: Kept, value: bytes) -> bool:
        """Put `value` in the place of `old`; refuse when something else stands there by now."""
        ...


class FileStore:
    """Dynamo's file backend: a folder whose files are named by key and expire 10 s after their last touch."""

    def __init__(self, root: Path) -> None:
        self._folder = root / BUCKET

    async def read(self, key: str) -> Kept | None:
        """Return the file's content, None when it does not exist."""
        return await asyncio.to_thread(self._read, key)

    async def replace(self, key: str, old: Kept, value: bytes) -> bool:
        """Rename a fresh file into place: nobody reads half of it, nobody finds it expired."""
        return await asyncio.to_thread(self._replace, key, old, value)

    def _path(self, key: str) -> Path:
        """Return the file of a key. Source: measured: all but ASCII letters and digits is percent-encoded."""
        return self._folder / "".join(
            char if char.isascii() and char.isalnum() else "".join(f"%{byte:02X}" for byte in char.encode())
            for char in key
        )

    def _read(self, key: str) -> Kept | None:
        try:
            return Kept(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordUnchangeable(f"the discovery file cannot be read: {error}") from error

    def _replace(self, key: str, old: Kept, value: bytes) -> bool:
        path = self._path(key)
        new = self._folder / f".tmp_{secrets.token_hex(8)}"  # Dynamo's own name for one that is not ready
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            new.write_bytes(value)
            new.chmod(mode)
            if path.read_bytes() != old.value:
                return False
            new.rename(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RecordUnchangeable(f"the discovery file cannot be replaced: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        return True


class EtcdStore:
    """etcd, over the JSON gateway that every server has at its client port."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self._endpoints = endpoints

    async def read(self, key: str) -> Kept | None:
        """Return the record with its revision and lease, None when it does not exist."""
        answer = await self._ask("kv/range", {"key": _b64(f"{BUCKET}/{key}".encode())})
        kvs = answer.get("kvs")
        if not kvs:
            return None
        try:
            kv = kvs[0]
            return Kept(
                base64.b64decode(kv["value"], validate=True),
                str(kv["mod_revision"]),
                str(kv.get("lease", "0")),
            )
        except (KeyError, TypeError, IndexError, binascii.Error) as error:
            raise RecordUnchangeable(f"etcd's answer was not understood: {error!r}") from error

    async def replace(self, key: str, old: Kept, value: bytes) -> bool:
        """Put under the record's own lease, if its revision is still the one that was read."""
        name = _b64(f"{BUCKET}/{key}".encode())
        unchanged = {"key": name, "target": "MOD", "result": "EQUAL", "modRevision": old.revision}
        put = {"key": name, "value": _b64(value), "lease": old.lease}
        answer = await self._ask("kv/txn", {"compare": [unchanged], "success": [{"requestPut": put}]})
        return answer.get("succeeded") is True  # left out when false

    async def _ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the first of the endpoints that answers."""
        said: list[str] = []
        timeout = aiohttp.ClientTimeout(total=ETCD_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:  # a handful of calls in a process's life
            for endpoint in self._endpoints:
                try:
                    async with http.post(f"{endpoint}/v3/{method}", json=body) as response:
                        if response.status == 200:
                            answer = json.loads(await response.read())
                            if isinstance(answer, dict):
                                return answer
                        said.append(f"{endpoint}: HTTP status {response.status}")
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    said.append(f"{endpoint}: {error!r}")
        raise RecordUnchangeable("etcd did not answer: " + "; ".join(said))


def store_of(environ: Mapping[str, str]) -> Store:
    """Return the store that Dynamo's own variables name.

    Raises:  RecordUnchangeable for one whose records cannot be replaced from here.
    """
    backend = environ.get("DYN_DISCOVERY_BACKEND", "etcd")
    if backend == "file":
        root = environ.get("DYN_FILE_KV")
        if not root:
            raise RecordUnchangeable("discovery is in files, but DYN_FILE_KV does not say where")
        return FileStore(Path(root))
    if backend != "etcd":
        raise RecordUnchangeable(f"records of discovery backend {backend!r} cannot be rewritten")
    guarded = sorted(name for name, value in environ.items() if name.startswith("ETCD_AUTH_") and value)
    if guarded:
        raise RecordUnchangeable(f"etcd with authentication is not supported ({', '.join(guarded)} set)")
    named = environ.get("ETCD_ENDPOINTS") or "http://localhost:2379"
    endpoints = tuple(_url(endpoint.strip()) for endpoint in named.split(",") if endpoint.strip())
    return EtcdStore(endpoints)


def _url(endpoint: str) -> str:
    scheme, _, rest = endpoint.rpartition("://")
    if scheme == "https":
        raise RecordUnchangeable(f"etcd at {endpoint} uses TLS, which is not supported")
    return f"http://{rest.rstrip('/')}"


class InstanceRecord:
    """Our entry in discovery for one endpoint we serve; leaving the block puts back what was there.

    endpoint:     its Dynamo path, `namespace.component.endpoint`
    instance_id:  `Endpoint.connection_id()`
    """

    def __init__(self, store: Store, endpoint: str, instance_id: int, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._key = f"{endpoint.replace('.', '/')}/{instance_id:x}"
        self._original: bytes | None = None
        self._ours: bytes = b""

    async def __aenter__(self) -> Self:
        """Change nothing yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the record, if it was rewritten."""
        try:
            await self.restore()
        except RecordUnchangeable as failed:  # the record ends with this process all the same
            log.warning("poa.record.left", record=self._key, error=failed.reason)

    @property
    def rewritten(self) -> bool:
        """Tell whether the record was made to point to the relay and not restored since."""
        return self._original is not None

    async def wait(self, timeout_s: float) -> Address:
        """Wait until Dynamo has written the record, which `serve_endpoint` does in its own time.

        Returns:  the address of Dynamo's own listener.
        Raises:   RecordUnchangeable when it does not come, or is not one we understand.
        """
        give_up_at_s = self._clock.monotonic_s() + timeout_s
        while (kept := await self._store.read(self._key)) is None:
            if self._clock.monotonic_s() >= give_up_at_s:
                raise RecordUnchangeable(f"discovery has no record {self._key} after {timeout_s:g} s")
            await self._clock.sleep(POLL_S)
        return _address(_parsed(kept.value))

    async def rewrite(self, host: str, port: int) -> Address:
        """Send requests to another listener from now on.

        Returns:  the address that stood there before: where Dynamo's own listener is.
        Raises:   RecordUnchangeable when the record is not there or cannot be replaced: unchanged then.
        """
        for _ in range(ATTEMPTS):
            kept = await self._store.read(self._key)
            if kept is None:
                raise RecordUnchangeable(f"discovery has no record {self._key}")
            original = kept.value
            if self._original is not None and original == self._ours:
                original = self._original  # rewritten a second time
            record = _parsed(original)
            before = _address(record)
            record["transport"]["tcp"] = str(before._replace(host=host, port=port))
            ours = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
            if await self._store.replace(self._key, kept, ours):
                self._original, self._ours = original, ours
                return before
        raise RecordUnchangeable(f"discovery's record {self._key} changes faster than it can be replaced")

    async def restore(self) -> bool:
        """Put back exactly what was there, unless our version is not there any more.

        Returns:  whether it was put back: not when it was never rewritten, has gone, or is Dynamo's anew.
        Raises:   RecordUnchangeable when the store does not do it; try again.
        """
        if self._original is None:
            return False
        kept = await self._store.read(self._key)
        restored = (
            kept is not None
            and kept.value == self._ours
            and await self._store.replace(self._key, kept, self._original)
        )
        self._original = None
        return restored


def _parsed(value: bytes) -> dict[str, Any]:
    try:
        record = json.loads(value)  # Python's integers: a 64-bit id stays what it is
    except ValueError as error:
        raise RecordUnchangeable(f"the discovery record is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RecordUnchangeable("the discovery record is not a mapping")
    return record


def _address(record: dict[str, Any]) -> Address:
    transport = record.get("transport")
    text = transport.get("tcp") if isinstance(transport, dict) else None
    if not isinstance(text, str):
        raise RecordUnchangeable(f"the instance is not reached over tcp: transport = {transport!r}")
    try:
        return Address.parse(text)
    except ValueError as error:
        raise RecordUnchangeable(f"the instance's address was not understood: {error}") from error


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
