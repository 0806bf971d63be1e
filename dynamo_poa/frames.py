"""Decides where a frame of Dynamo's tcp request plane begins and ends, what it says, and how it is changed.

Owns: the byte layout of requests, acknowledgements and the frames of answers; bounds on their sizes; what a
      relay changes: whom a request goes to, where its answer comes back to, single fields of its body.
Does not own: connections, what is done with bytes that are refused here, or how an answer went (answers.py).
Invariant: any bytes, however split, are parsed, refused with a FrameError, or wait for more; what is held is
           bounded by the limits; what is not changed on purpose stays the byte it was.
Source: measured: ai-dynamo 1.4.2 and 1.6.1 (frontend), captured by a proxy; tests/fixtures/frames_*.bin.
        host: lib/runtime/src/pipeline/network/codec.rs, codec/two_part.rs, tcp.rs. No public interface:
        Dynamo may change it in any release.

Integers are big-endian. On a request connection, requester to worker, one after the other without waiting:

    u16 n | path, n bytes            "<instance id in hex, not padded>/<endpoint>"
    u16 n | headers, n bytes         JSON object of strings, in any order; no worker reads it
    u32 n | payload, n bytes         a two-part frame: control (JSON) and body (msgpack or JSON)

and back, one for each, in the same order, which is all that matches them:

    u32 n | text, n bytes            empty: taken over; anything else: refused

A two-part frame, on its own or as a payload:

    u64 header_len | u64 body_len | u64 checksum | header | body        checksum is 0 in released builds

On an answer's connection, which the worker opens to the address in the request's control:

    worker     handshake {"subject", "stream_type"}                header only
               prologue  {"error": null} or {"error": "<text>"}    header only
               data      {"data": {"data": chunk}, "complete_final": false}, or
                         {"data": {"event": "error", "error": {...}}, "complete_final": false}    body only
               final     {"complete_final": true}                  body only; without it the answer is cut off
               "sentinel"                                          header only, for form's sake
    requester  "stop" or "kill", if at all                         header only
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from dynamo_poa.errors import FrameError

ACCEPTED = b"\x00\x00\x00\x00"  # the acknowledgement of a frame that was taken over
FINAL_BODY = b"\x81\xaecomplete_final\xc3"  # msgpack {"complete_final": true}

TWO_PART = struct.Struct(">QQQ")  # header_len, body_len, checksum
_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")
_Message = TypeVar("_Message", bound=msgspec.Struct)
_PATH_KEY = b'"x-endpoint-path":'
_CONTROLS: dict[bytes, Literal["stop", "kill", "sentinel"]] = {
    b'"stop"': "stop",
    b'"kill"': "kill",
    b'"sentinel"': "sentinel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What is refused before it is buffered.

    payload_bytes:  of one request; Dynamo refuses frames of more than 32 MiB itself
    part_bytes:     of each part of a two-part frame that is not a payload: handshakes, prologues, controls
    """

    path_bytes: int = 1_024
    headers_bytes: int = 16_384
    payload_bytes: int = 32 * 1024 * 1024
    ack_bytes: int = 4_096
    part_bytes: int = 65_536


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """One request as it came; the views look into `raw`.

    path:  undecodable bytes show as U+FFFD, so that such a path is one nobody serves
    """

    raw: bytes
    path: str
    headers: memoryview
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TwoPart:
    """A two-part frame; `raw` is all of it."""

    raw: bytes
    header: bytes
    body: bytes

    @property
    def control(self) -> Literal["stop", "kill", "sentinel"] | None:
        """Return what a control frame asks for, None for every other frame."""
        return None if self.body else _CONTROLS.get(self.header)


class _Parser:
    """Bytes in, frames out. After a refusal nothing on this connection can be told apart any more."""

    def __init__(self, limits: FrameLimits | None = None) -> None:
        self._limits = limits or FrameLimits()
        self._held = bytearray()
        self._refused: FrameError | None = None

    @property
    def pending(self) -> bytes:
        """Return the bytes that no frame has been made of: to be handed on when they are not understood."""
        return bytes(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take what came; ask for frames before feeding more, or what is held grows with what is fed.

        Raises:   FrameError, after a refusal: the connection is past understanding.
        """
        if self._refused is not None:
            raise self._refused
        self._held += data

    def _refuse(self, reason: str, detail: str) -> FrameError:
        self._refused = FrameError(reason, detail)
        return self._refused

    def _length(self, at: int, layout: struct.Struct, most: int, what: str) -> int | None:
        """Return where the field at `at` ends, None while its length is incomplete."""
        start = at + layout.size
        if len(self._held) < start:
            return None
        (length,) = layout.unpack_from(self._held, at)
        if length > most:
            raise self._refuse(f"{what}_size", f"{length} bytes: must be <= {most}")
        return start + int(length)

    def _cut(self, end: int) -> bytes:
        raw = bytes(memoryview(self._held)[:end])
        del self._held[:end]
        return raw


class RequestParser(_Parser):
    """Cuts a request connection into frames."""

    def next(self) -> RequestFrame | None:
        """Return the next request, None while it is incomplete.

        Raises:   FrameError, as soon as a length over its bound can be read; `pending` begins with it.
        """
        if self._refused is not None:
            raise self._refused
        path_end = self._length(0, _U16, self._limits.path_bytes, "path")
        if path_end is None:
            return None
        headers_end = self._length(path_end, _U16, self._limits.headers_bytes, "headers")
        if headers_end is None:
            return None
        end = self._length(headers_end, _U32, self._limits.payload_bytes, "payload")
        if end is None or len(self._held) < end:
            return None
        raw = self._cut(end)
        view = memoryview(raw)
        return RequestFrame(
            raw=raw,
            path=raw[_U16.size : path_end].decode("utf-8", "replace"),
            headers=view[path_end + _U16.size : headers_end],
            payload=view[headers_end + _U32.size :],
        )


class AckParser(_Parser):
    """Cuts the way back of a request connection into acknowledgements."""

    def next(self) -> str | None:
        """Return the next acknowledgement's text, empty for a frame taken over; None while incomplete."""
        if self._refused is not None:
            raise self._refused
        end = self._length(0, _U32, self._limits.ack_bytes, "ack")
        if end is None or len(self._held) < end:
            return None
        return self._cut(end)[_U32.size :].decode("utf-8", "replace")


class TwoPartParser(_Parser):
    """Cuts either way of an answer's connection into frames: for handshakes, prologues and controls."""

    def next(self) -> TwoPart | None:
        """Return the next frame, None while it is incomplete.

        Raises:   FrameError, as soon as the length of a part over its bound can be read.
        """
        if self._refused is not None:
            raise self._refused
        if len(self._held) < TWO_PART.size:
            return None
        header_bytes, body_bytes, _ = TWO_PART.unpack_from(self._held)
        if max(header_bytes, body_bytes) > self._limits.part_bytes:
            detail = f"{header_bytes} and {body_bytes} bytes: must be <= {self._limits.part_bytes}"
            raise self._refuse("part_size", detail)
        header_end = TWO_PART.size + header_bytes
        if len(self._held) < header_end + body_bytes:
            return None
        raw = self._cut(header_end + body_bytes)
        return TwoPart(raw=raw, header=raw[TWO_PART.size : header_end], body=raw[header_end:])


class _Connection(msgspec.Struct):
    transport: str
    info: str  # JSON text of _Return


class _Control(msgspec.Struct):
    id: str
    request_type: str
    response_type: str
    connection_info: _Connection
    payload_codec: str = "json"


class _Return(msgspec.Struct):
    address: str
    subject: str
    context: str
    stream_type: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a request frame says.

    id:        the request's, the same on both legs
    address:   where its requester waits for the answer
    subject:   what the answer's handshake must name
    """

    frame: RequestFrame
    id: str
    address: str
    subject: str
    _fields: dict[str, msgspec.Raw] = field(repr=False)
    _body_at: int
    _info: bytes
    _around_info: tuple[bytes, bytes]  # in the control

    def get(self, name: str) -> Any:
        """Return one field of the body, None where it is missing. Integers are exact, binary is bytes.

        Raises:   FrameError: it is nested too deeply, or holds something msgpack allows and Python does not.
        """
        raw = self._fields.get(name)
        return None if raw is None else decoded(raw)

    def sent_to(
        self,
        path: str,
        address: str,
        changes: Mapping[str, object] | None = None,
        *,
        subject: str | None = None,
        name: str | None = None,
    ) -> bytes:
        """Return the frame for another instance, whose answer is to come back to `address`.

        Every byte stays but the path's (in the headers too), the address's, the subject's and the id's where
        one is given, and those of the fields changed.

        Args:     path: `<instance id in hex>/<endpoint>`.  changes: whole fields of the body, new ones too.
                  subject: what the answer's handshake is to name instead.
                  name: the request's id for that instance, instead.
        """
        frame = self.frame
        info = self._info.replace(_json(self.address), _json(address))
        around, headers = self._around_info, bytes(frame.headers)
        if subject is not None:
            info = info.replace(_json(self.subject), _json(subject))
        if name is not None:
            old, new = _json(self.id), _json(name)
            info, headers = info.replace(old, new), headers.replace(old, new)
            around = around[0].replace(old, new), around[1].replace(old, new)
        control = _json(info.decode()).join(around)
        body: bytes | memoryview = frame.payload[self._body_at :]
        if changes:
            body = msgspec.msgpack.encode({**self._fields, **changes})
        headers = headers.replace(_PATH_KEY + _json(frame.path), _PATH_KEY + _json(path), 1)
        return request_frame(path, headers, two_part(control, body))


def read_request(frame: RequestFrame) -> Request:
    """Return what a request says; the body's fields stay bytes until they are asked for.

    Raises:   FrameError, whose reason says which part is not as measured: `two_part`, `checksum`, `control`,
              `transport`, `codec`, `return`, `address`, `body`.
    """
    payload = frame.payload
    if len(payload) < TWO_PART.size:
        raise FrameError("two_part", f"{len(payload)} bytes: must be >= {TWO_PART.size}")
    control_bytes, body_bytes, checksum = TWO_PART.unpack_from(payload)
    body_at = TWO_PART.size + control_bytes
    if len(payload) != body_at + body_bytes:
        raise FrameError("two_part", f"{len(payload)} bytes: must be {body_at + body_bytes}")
    if checksum:  # only debug builds write one; it would be wrong after a change
        raise FrameError("checksum", f"{checksum}: must be 0")
    control_text = bytes(payload[TWO_PART.size : body_at])
    control = _read(control_text, _Control, "control")
    if (control.request_type, control.response_type) != ("single_in", "many_out"):
        raise FrameError("control", f"{control.request_type} and {control.response_type}")
    if control.connection_info.transport != "tcp_server":
        raise FrameError("transport", control.connection_info.transport)
    if control.payload_codec != "msgpack":
        raise FrameError("codec", control.payload_codec)
    info = control.connection_info.info
    info_text = info.encode()
    back = _read(info_text, _Return, "return")
    if back.stream_type != "response" or back.context != control.id:
        raise FrameError("return", f"{back.stream_type} of {back.context} for {control.id}")
    split_address(back.address)
    for value in (back.address, back.subject):
        _around(info_text, value)  # a request is taken over only if it can also be sent on
    return Request(
        frame=frame,
        id=control.id,
        address=back.address,
        subject=back.subject,
        _fields=map_fields(payload[body_at:]),
        _body_at=body_at,
        _info=info_text,
        _around_info=_around(control_text, info),
    )


def request_frame(path: str, headers: bytes, payload: bytes) -> bytes:
    """Return a request frame. Raises FrameError: `path_size`, for a path whose length cannot be written."""
    name = path.encode()
    if len(name) > 0xFFFF:
        raise FrameError("path_size", f"{len(name)} bytes: must be <= 65535")
    return b"".join(
        (_U16.pack(len(name)), name, _U16.pack(len(headers)), headers, _U32.pack(len(payload)), payload)
    )


def two_part(header: bytes, body: bytes | memoryview = b"") -> bytes:
    """Return a two-part frame."""
    return b"".join((TWO_PART.pack(len(header), len(body), 0), header, body))


def handshake(subject: str) -> bytes:
    """Return the first frame of an answer."""
    return two_part(_json({"subject": subject, "stream_type": "response"}))


def prologue(error: str | None = None) -> bytes:
    """Return the second frame of an answer. With an error it is also the last but the sentinel."""
    return two_part(_json({"error": error}))


def error_answer(message: str) -> bytes:
    """Return what follows the prologue of an answer that fails, as if a handler of Dynamo's had raised."""
    error = {"error_type": {"Backend": "Unknown"}, "message": message}
    data = {"data": {"event": "error", "error": error}, "complete_final": False}
    return two_part(b"", msgspec.msgpack.encode(data)) + two_part(b"", FINAL_BODY) + control("sentinel")


def control(word: Literal["stop", "kill", "sentinel"]) -> bytes:
    """Return a control frame: `stop` and `kill` go to the worker, `sentinel` to the requester."""
    return two_part(_json(word))


def subject_of(part: TwoPart) -> str:
    """Return whose answer a connection carries, from its first frame. Raises FrameError: `handshake`."""
    message = _read(part.header, _Handshake, "handshake")
    if part.body or message.stream_type != "response":
        raise FrameError("handshake", f"{message.stream_type}, body of {len(part.body)} bytes")
    return message.subject


def error_of(part: TwoPart) -> str | None:
    """Return why a worker could not begin, None when it has begun. Raises FrameError: `prologue`."""
    message = _read(part.header, _Prologue, "prologue")
    if part.body:
        raise FrameError("prologue", f"body of {len(part.body)} bytes")
    return message.error


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; Dynamo writes IPv6 addresses with and without brackets. Raises FrameError."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise FrameError("address", f"{address[:100]!r}: must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def split_transport(tcp: str) -> tuple[str, int, str]:
    """Return host, port and path of an instance record's `transport.tcp`. Raises FrameError: `address`."""
    address, _, path = tcp.partition("/")
    return *split_address(address), path


class _Handshake(msgspec.Struct):
    subject: str
    stream_type: str


class _Prologue(msgspec.Struct):
    error: str | None


def map_fields(body: bytes | bytearray | memoryview | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return a msgpack map's values as they are. Raises FrameError: `body`, also where one is cut short."""
    try:
        return msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError("body", str(error)) from error


def decoded(raw: msgspec.Raw) -> Any:
    """Return one value of `map_fields`. Raises FrameError: `body`."""
    try:
        return msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:  # TypeError: a key that cannot be one
        raise FrameError("body", str(error)) from error


def _read(text: bytes, kind: type[_Message], reason: str) -> _Message:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(reason, str(error)) from error


_json = msgspec.json.encode


def _around(text: bytes, value: str) -> tuple[bytes, bytes]:
    """Return what stands before and after a JSON string's one occurrence. Raises FrameError: `control`."""
    parts = text.split(_json(value))
    if len(parts) != 2:
        raise FrameError("control", f"{value[:100]!r} occurs {len(parts) - 1} times: must be 1")
    return parts[0], parts[1]
