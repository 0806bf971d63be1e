"""Decides how a worker's answer went, from its bytes as they pass: begun, complete, failed or cut off.

Owns: following the frames' lengths, so that nothing but the last data frame of an answer is ever read.
Does not own: the bytes' way to the requester, or the layout of a frame (frames.py).
Invariant: never raises; holds at most the bodies of two data frames of up to KEPT_BYTES, and a frame's head.
Source: measured, ai-dynamo 1.4.2: the requester takes an answer for complete if its final frame has come,
        with or without the sentinel; handlers that raise and engines that fail send a final frame as well.
"""

import msgspec

from dynamo_poa.errors import FrameError
from dynamo_poa.frames import FINAL_BODY, TWO_PART, decoded, map_fields

KEPT_BYTES = 65_536  # of a data frame, to tell an engine's error from a chunk


class AnswerWatch:
    """Follows what a worker sends, from its first byte or any later frame on, without holding any of it up.

    data_frames:  whole data frames so far, the final one not among them
    final:        the worker has said that the answer is complete
    failure:      known once it is: what the engine or its handler reported instead of an end, None if neither
    lost:         what came is no answer any more; the answer counts as cut off
    """

    __slots__ = (
        "_body",
        "_control",
        "_head",
        "_kept",
        "_large",
        "_left",
        "data_frames",
        "failure",
        "final",
        "lost",
    )

    def __init__(self) -> None:
        self.data_frames = 0
        self.final = False
        self.failure: str | None = None
        self.lost = False
        self._head = b""  # of a frame, while incomplete
        self._left = 0  # bytes of the current frame that have not come
        self._control = False  # the current frame has a header
        self._large = False  # its body is too large to keep
        self._body = bytearray()  # of the current frame, unless it is large or a control
        self._kept: bytes | bytearray = b""  # the body of the last whole data frame; a large one was no error

    @property
    def complete(self) -> bool:
        """Tell whether the answer ended as a good one does. A final frame alone also follows errors."""
        return self.final and self.failure is None

    @property
    def between_frames(self) -> bool:
        """Tell whether another frame may follow what has come: all of the last one, and no sentinel."""
        return not (self._left or self._head or self._control or self.lost)

    @property
    def reported(self) -> str | None:
        """Return the failure the last whole data frame reports. Reads that frame: not for every chunk."""
        return _failure(self._kept)

    @property
    def failing(self) -> bool:
        """Tell whether the last whole data frame reports a failure."""
        return self.reported is not None

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are kept."""
        return len(self._head) + len(self._body) + len(self._kept)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer. Never raises."""
        at, size = 0, len(data)
        while at < size and not self.lost:
            if not self._left:
                at = self._begin(data, at)
                continue
            # The rare path: a frame that came in pieces.
            taken = min(self._left, size - at)
            if not (self._control or self._large):
                self._body += data[at : at + taken]
            at += taken
            self._left -= taken
            if not self._left:
                body, self._body = self._body, bytearray()
                self._end(body)

    def _begin(self, data: bytes, at: int) -> int:
        """Take a frame's head, and the frame if all of it is there; return where to go on."""
        start: int = at + TWO_PART.size - len(self._head)
        if self._head or len(data) < start:
            self._head += data[at:start]
            if len(self._head) < TWO_PART.size:
                return len(data)
            header_bytes, body_bytes, _ = TWO_PART.unpack(self._head)
            self._head = b""
        else:
            header_bytes, body_bytes, _ = TWO_PART.unpack_from(data, at)
        self._control = header_bytes > 0
        self._large = body_bytes > KEPT_BYTES
        if self.final and not self._control:
            self.lost = True  # nothing follows the final frame but the sentinel
        elif self._control or self._large or len(data) < start + body_bytes:
            self._left = header_bytes + body_bytes
        else:
            self._end(data[start : start + body_bytes])
            start += body_bytes
        return start

    def _end(self, body: bytes | bytearray) -> None:
        if self._control:
            return
        if body == FINAL_BODY:
            self.final = True
            self.failure = _failure(self._kept)
        else:
            self.data_frames += 1
            self._kept = body


def _failure(body: bytes | bytearray) -> str | None:
    """Return what a data frame says went wrong, None where it says nothing of the kind."""
    try:
        annotated = map_fields(map_fields(body)["data"])
        if "event" in annotated and decoded(annotated["event"]) == "error":
            return _text(annotated.get("error"))
        reason = map_fields(annotated["data"]).get("finish_reason")
        return _text(reason) if reason is not None and isinstance(decoded(reason), dict) else None
    except (FrameError, KeyError):
        return None  # not a chunk of tokens, so it cannot say so


def _text(raw: msgspec.Raw | None) -> str:
    value = None if raw is None else decoded(raw)
    if isinstance(value, dict):
        value = value.get("message") or value.get("error")
    return value[:500] if isinstance(value, str) else "no message"
