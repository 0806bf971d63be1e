"""Which bytes of a file are a recorded message of the event plane, and which are not.

Owns: the NDJSON format: one header line, then `{"t": ..., "subject": ..., "data": base64}` a message; writing
      it as it comes; reading it with a count of what could not be read.
Does not own: which subjects are recorded (serve/commands.py) or what a message means (wire.py).
Invariant: what a reader yields is what a writer was given, byte for byte; memory is one line of the file.
Source: the format of tests/fixtures, which have no header; a recording may be cut off anywhere, and may have
        been compressed with gzip.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, NamedTuple, Self

import msgspec

from dynamo_poa.errors import RecordingError

FORMAT = 1
_GZIP = b"\x1f\x8b"
MAX_LINE_BYTES = 8 * 2**20  # the largest message we decode is 4 MiB, a third more in base64


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `version` is the package's that wrote it, `started_at_s` seconds since the epoch."""

    recording: int
    namespace: str
    started_at_s: float
    version: str


class Line(NamedTuple):
    """One message as it was received, at an instant in seconds since the epoch."""

    at_s: float
    subject: str
    data: bytes


class _Message(msgspec.Struct, frozen=True):
    t: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    subject: str
    data: bytes  # base64 in JSON


class _Foreign(msgspec.Struct, frozen=True):
    """What tells a header from a message, read before either is believed."""

    recording: int | None = None


# What decoding a line raises; brackets nested by the thousand are the second.
_BAD_LINE = (msgspec.DecodeError, RecursionError)

_decode_message = msgspec.json.Decoder(_Message).decode
_encode = msgspec.json.Encoder().encode


class Writer:
    """Writes a recording; enter it to open the file, which replaces one that is there.

    messages, written_bytes:  so far, the header not counted as a message

    Raises:  RecordingError naming the file, from entering, `write`, `flush` and leaving.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.messages = 0
        self.written_bytes = 0
        self._path = path
        self._header = header
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise self._cannot_write(error) from error
        try:
            self._put(self._header)
            self.flush()  # an unwritable file is known before anybody has waited
        except RecordingError:
            with suppress(OSError):  # the buffer cannot be written, and closing tries again
                self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as failure:
            if kind is None:  # otherwise it is the consequence of what is being raised
                raise self._cannot_write(failure) from failure

    def write(self, at_s: float, subject: str, data: bytes) -> None:
        """Append one message."""
        self._put(_Message(at_s, subject, data))
        self.messages += 1

    def flush(self) -> None:
        """Hand everything to the system, so that a reader sees it."""
        assert self._file is not None
        try:
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _put(self, line: Header | _Message) -> None:
        assert self._file is not None
        encoded = _encode(line) + b"\n"
        try:
            self._file.write(encoded)
        except OSError as error:
            raise self._cannot_write(error) from error
        self.written_bytes += len(encoded)

    def _cannot_write(self, error: OSError) -> RecordingError:
        return RecordingError(f"{self._path}: cannot be written: {error.strerror or error}")


class Reader:
    """The messages of a recording, in the order they were written.

    header:   None for a file that starts with a message, as the fixtures do
    lines:    read so far, of any kind
    skipped:  lines that are no message, by reason: `not_json`, `not_a_message`, `too_long`, `truncated`, and
              `gzip_damaged`, after which nothing more can be read
    """

    def __init__(self, path: Path) -> None:
        self.header: Header | None = None
        self.lines = 0
        self.skipped: Counter[str] = Counter()
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        """Yield every message that can be read.

        Raises:  RecordingError when the file cannot be opened or read, is empty, or its first line is neither
                 a header nor a message.
        """
        try:
            with self._path.open("rb") as file:
                compressed = file.peek(len(_GZIP)).startswith(_GZIP)
                yield from self._messages(gzip.GzipFile(fileobj=file) if compressed else file)
        except OSError as error:
            raise RecordingError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    def _messages(self, file: BinaryIO | gzip.GzipFile) -> Iterator[Line]:
        first = self._next(file)
        if not first and not self.skipped:
            raise RecordingError(f"{self._path}: is empty, not a recording")
        self.lines += 1
        if not self._is_header(first):
            try:
                yield _line(first)
            except _BAD_LINE as error:
                raise RecordingError(
                    f"{self._path}: not a recording: its first line is neither a header nor a message"
                ) from error
        while encoded := self._next(file):
            self.lines += 1
            if not encoded.endswith(b"\n") and len(encoded) == MAX_LINE_BYTES:
                self.skipped["too_long"] += 1
                while (rest := self._next(file)) and not rest.endswith(b"\n"):
                    pass
                continue
            try:
                yield _line(encoded)
            except _BAD_LINE as error:
                self.skipped[_reason(encoded, error)] += 1

    def _next(self, file: BinaryIO | gzip.GzipFile) -> bytes:
        """Return the next line or as much of it as is allowed, nothing at the end."""
        try:
            return file.readline(MAX_LINE_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.skipped["gzip_damaged"] += 1
            return b""

    def _is_header(self, encoded: bytes) -> bool:
        try:
            number = msgspec.json.decode(encoded, type=_Foreign).recording
            if number is None:
                return False
            if number != FORMAT:
                raise RecordingError(f"{self._path}: recording format {number}: must be {FORMAT}")
            self.header = msgspec.json.decode(encoded, type=Header)
        except _BAD_LINE:
            return False
        return True


def _line(encoded: bytes) -> Line:
    message = _decode_message(encoded)
    return Line(message.t, message.subject, message.data)


def _reason(encoded: bytes, error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return "not_a_message"
    return "not_json" if encoded.endswith(b"\n") else "truncated"
