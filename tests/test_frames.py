"""Where a frame of Dynamo's request plane ends, what it says, and what stays when a relay changes it."""

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.errors import FrameError
from dynamo_poa.frames import (
    ACCEPTED,
    AckParser,
    FrameLimits,
    Request,
    RequestFrame,
    RequestParser,
    TwoPart,
    TwoPartParser,
    control,
    error_answer,
    error_of,
    handshake,
    prologue,
    read_request,
    request_frame,
    split_address,
    split_transport,
    subject_of,
    two_part,
)

FIXTURES = Path(__file__).parent / "fixtures"
MSGPACK_REQUESTS = ("request", "request_1_6_1", "request_prefill", "request_decode", "request_values")
ANSWERS = (
    "response",
    "response_prefill",
    "response_raised_before_first",
    "response_raised_midway",
    "response_not_started",
    "response_cancelled",
    "response_json",
    "response_json_raised",
)
SMALL = FrameLimits(path_bytes=16, headers_bytes=32, payload_bytes=64, ack_bytes=16, part_bytes=64)


def captured(name: str) -> bytes:
    return (FIXTURES / f"frames_{name}.bin").read_bytes()


def requests_in(data: bytes) -> list[RequestFrame]:
    parser = RequestParser()
    parser.feed(data)
    return list(iter(parser.next, None))


def request_in(name: str) -> Request:
    (frame,) = requests_in(captured(name))
    return read_request(frame)


def parts_in(data: bytes) -> list[TwoPart]:
    parser = TwoPartParser()
    parser.feed(data)
    return list(iter(parser.next, None))


def remade(frame: RequestFrame) -> bytes:
    return request_frame(frame.path, bytes(frame.headers), bytes(frame.payload))


def request_with(**control_changes: object) -> RequestFrame:
    """A request like Dynamo's with parts of its control changed, or its `info`, `body` or `checksum`."""
    info: dict[str, object] = {
        "address": "127.0.0.1:4000",
        "subject": "s",
        "context": "r",
        "stream_type": "response",
        **control_changes.pop("info", {}),  # type: ignore[dict-item]
    }
    body = control_changes.pop("body", msgspec.msgpack.encode({"token_ids": [1]}))
    checksum = control_changes.pop("checksum", 0)
    header = {
        "id": "r",
        "request_type": "single_in",
        "response_type": "many_out",
        "payload_codec": "msgpack",
        "connection_info": {"transport": "tcp_server", "info": msgspec.json.encode(info).decode()},
        **control_changes,
    }
    text = msgspec.json.encode(header)
    payload = struct.pack(">QQQ", len(text), len(body), checksum) + text + body  # type: ignore[arg-type,operator]
    (frame,) = requests_in(request_frame("a/generate", b"{}", payload))
    return frame


def refusal_of(frame: RequestFrame) -> str:
    with pytest.raises(FrameError) as refused:
        read_request(frame)
    return refused.value.reason


# --- what was captured


@pytest.mark.parametrize("name", [*MSGPACK_REQUESTS, "request_json"])
def test_a_captured_request_is_one_frame_and_is_made_again_byte_for_byte(name: str) -> None:
    """Source: frames_*.bin, ai-dynamo 1.4.2 and 1.6.1."""
    data = captured(name)
    (frame,) = requests_in(data)
    assert frame.raw == data
    assert remade(frame) == data


def test_requests_sent_without_waiting_are_told_apart() -> None:
    """Source: two frames of 2000 tokens that a frontend wrote at once."""
    data = captured("request_pipelined")
    frames = requests_in(data)
    assert [len(frame.raw) for frame in frames] == [7167, 7167]
    assert b"".join(map(remade, frames)) == data
    assert [len(read_request(frame).get("token_ids")) for frame in frames] == [2000, 2000]


def test_a_captured_request_says_whom_it_is_for_and_where_its_answer_goes() -> None:
    """The address is IPv6 without brackets. Source: frames_request.bin."""
    request = request_in("request")
    assert request.frame.path == "8796bbafaa841d7d/generate"
    assert request.address.startswith("::1:")
    assert split_address(request.address) == ("::1", int(request.address[4:]))
    assert len(request.id) == len(request.subject) == 36
    assert request.id != request.subject
    assert request.get("model") == "mock-llama-3.1-70b"
    assert request.get("token_ids") == list(range(1000, 1010))
    assert request.get("router_config_override") is None
    assert request.get("no such field") is None


def test_binary_and_unsigned_64_bit_values_are_read_exactly() -> None:
    """Source: frames_request_prefill.bin, frames_request_values.bin."""
    info = request_in("request_prefill").get("bootstrap_info")
    assert info == {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 1,
        "bootstrap_room": 0x37EFFC48F3F84586,
        "handoff_id": bytes.fromhex("cbac32c063e84f5da98307385ec88b69"),
    }
    assert request_in("request_prefill").get("routing") == {"prefill_worker_id": 0xD974C4112C070A0D}
    assert request_in("request_values").get("big") == 2**64 - 1
    assert request_in("request_values").get("blob") == b"\x00\xff\xfe"


@pytest.mark.parametrize("name", MSGPACK_REQUESTS)
def test_a_request_sent_on_unchanged_is_the_same_bytes(name: str) -> None:
    """Also when its fields are written anew with the values they had."""
    request = request_in(name)
    assert request.sent_to(request.frame.path, request.address) == request.frame.raw
    same = {
        field: request.get(field) for field in ("model", "bootstrap_info", "routing") if request.get(field)
    }
    assert request.sent_to(request.frame.path, request.address, same) == request.frame.raw


def test_only_what_is_changed_changes() -> None:
    """Path, address and one field are replaced in place; a 32-bit float beside them keeps its four bytes."""
    request = request_in("request_prefill")
    info = {**request.get("bootstrap_info"), "bootstrap_host": "10.0.0.1", "bootstrap_port": 65_000}
    sent = request.sent_to("1/generate", "[fe80::1]:65535", {"bootstrap_info": info})
    expected = request.frame.raw
    for old, new in (
        (b"d974c4112c070a0d/generate", b"1/generate"),
        (request.address.encode(), b"[fe80::1]:65535"),
        (b"\xa9127.0.0.1\xaebootstrap_port\x01", b"\xa810.0.0.1\xaebootstrap_port\xcd\xfd\xe8"),
        (struct.pack(">H", 25), struct.pack(">H", 10)),  # the path's length
        (struct.pack(">H", 0x91), struct.pack(">H", 0x91 - 15)),  # the headers'
    ):
        expected = expected.replace(old, new, 2 if b"/generate" in old else 1)
    grown = len("[fe80::1]:65535") - len(request.address)
    lengths = struct.pack(">IQQ", 0x5FD + grown + 1, 0x156 + grown, 0x48F + 1)
    expected = expected.replace(struct.pack(">IQQ", 0x5FD, 0x156, 0x48F), lengths, 1)
    assert sent == expected
    assert b"\xabtemperature\xca\x3f\x33\x33\x33" in sent


def test_an_answer_can_be_asked_for_under_another_subject() -> None:
    """So that a second attempt's answer is not taken for the first's; the id in the same text stays."""
    request = request_in("request")
    (frame,) = requests_in(request.sent_to("1/generate", "127.0.0.1:9", subject="attempt-2"))
    again = read_request(frame)
    assert (again.subject, again.address, again.id) == ("attempt-2", "127.0.0.1:9", request.id)
    assert again.sent_to(request.frame.path, request.address, subject=request.subject) == request.frame.raw


def test_a_request_can_be_sent_on_under_another_id() -> None:
    """In the control, in where the answer goes, and in the headers: nowhere is the old one left."""
    request = request_in("request_prefill")
    (frame,) = requests_in(request.sent_to("1/generate", "127.0.0.1:9", name="another"))
    again = read_request(frame)
    assert (again.id, again.subject) == ("another", request.subject)
    assert request.id.encode() in request.frame.raw
    assert request.id.encode() not in frame.raw
    assert again.sent_to(request.frame.path, request.address, name=request.id) == request.frame.raw


def test_what_is_sent_on_says_the_new_things_and_the_old() -> None:
    """Unsigned 64-bit and binary values survive in changed fields, and a field can be added."""
    changes = {"routing": {"prefill_worker_id": 2**64 - 1, "dp_rank": 3}, "extra": b"\x00\xff"}
    before = request_in("request_decode")
    (frame,) = requests_in(before.sent_to("ff/generate", "127.0.0.1:9", changes))
    after = read_request(frame)
    assert (after.frame.path, after.address) == ("ff/generate", "127.0.0.1:9")
    assert msgspec.json.decode(frame.headers)["x-endpoint-path"] == "ff/generate"
    assert (after.id, after.subject) == (before.id, before.subject)
    assert after.get("routing") == changes["routing"]
    assert after.get("extra") == b"\x00\xff"
    for name in ("token_ids", "bootstrap_info", "router_config_override", "sampling_options", "mdc_sum"):
        assert after.get(name) == before.get(name)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_captured_answer_is_frames_that_are_made_again_byte_for_byte(name: str) -> None:
    """Source: frames_response*.bin, one connection each from its first byte to its last."""
    data = captured(name)
    parts = parts_in(data)
    assert b"".join(two_part(part.header, part.body) for part in parts) == data
    assert b"".join(part.raw for part in parts) == data
    assert handshake(subject_of(parts[0])) == parts[0].raw


def test_a_captured_answer_begins_with_handshake_and_prologue_and_ends_with_the_sentinel() -> None:
    """Source: frames_response.bin: three tokens, the end of generation, the final frame, the sentinel."""
    parts = parts_in(captured("response"))
    assert [bool(part.body) for part in parts] == [False, False, True, True, True, True, True, False]
    assert error_of(parts[1]) is None
    assert prologue() == parts[1].raw
    assert [part.control for part in parts] == [None] * 7 + ["sentinel"]
    assert control("sentinel") == parts[-1].raw


def test_a_worker_that_cannot_begin_says_why_in_the_prologue() -> None:
    """Source: frames_response_not_started.bin: a handler of a signature Dynamo cannot call."""
    _, failed, sentinel = parts_in(captured("response_not_started"))
    error = "Generate Error: TypeError: main.<locals>.h() missing 1 required positional argument: 'ctx'"
    assert error_of(failed) == error
    assert prologue(error) == failed.raw
    assert sentinel.control == "sentinel"


def test_an_answer_that_fails_is_written_as_dynamo_writes_it() -> None:
    """A handler raised before its first chunk. Source: frames_response_raised_before_first.bin."""
    data = captured("response_raised_before_first")
    subject = subject_of(parts_in(data)[0])
    assert handshake(subject) + prologue() + error_answer("RuntimeError: raised before first") == data


@pytest.mark.parametrize("word", ["kill", "stop"])
def test_a_requester_that_wants_no_more_says_so(word: str) -> None:
    """Source: frames_control_*.bin: a dropped stream, and Context.stop_generating()."""
    (part,) = parts_in(captured(f"control_{word}"))
    assert part.control == word
    assert control(part.control) == part.raw


def test_an_acknowledgement_is_empty_or_says_why_not() -> None:
    """A worker that drains refuses so. Source: frames_ack*.bin."""
    parser = AckParser()
    parser.feed(captured("ack") + captured("ack_draining") + captured("ack")[:3])
    assert captured("ack") == ACCEPTED
    assert [parser.next(), parser.next(), parser.next()] == [
        "",
        "Unknown endpoint: 8796bbafaa841d7d/generate",
        None,
    ]
    parser.feed(b"\x00")
    assert parser.next() == ""


# --- what is refused


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00\x11", "path_size"),
        (b"\x00\x10" + b"p" * 16 + b"\x00\x21", "headers_size"),
        (b"\x00\x01p\x00\x00\x00\x00\x00\x41", "payload_size"),
        (b"\x00\x01p\x00\x00\xff\xff\xff\xff", "payload_size"),
    ],
)
def test_a_request_over_a_bound_is_refused_by_its_length_alone(data: bytes, reason: str) -> None:
    """It stays pending to be handed on, nothing more is taken in, and the refusal stands."""
    good = request_frame("p", b"{}", b"payload")
    parser = RequestParser(SMALL)
    parser.feed(good + data)
    frame = parser.next()
    assert frame is not None
    assert frame.raw == good
    for _ in range(2):
        with pytest.raises(FrameError) as refused:
            parser.next()
        assert refused.value.reason == reason
        with pytest.raises(FrameError):
            parser.feed(b"more")
    assert parser.pending == data


def test_a_request_of_exactly_the_bounds_passes() -> None:
    """One byte more of anything is refused above."""
    data = request_frame("p" * 16, b"h" * 32, b"b" * 64)
    parser = RequestParser(SMALL)
    parser.feed(data)
    frame = parser.next()
    assert frame is not None
    assert (frame.raw, frame.path, parser.pending) == (data, "p" * 16, b"")


@pytest.mark.parametrize("lengths", [(65, 0), (0, 65), (2**64 - 1, 2**64 - 1)])
def test_an_oversize_part_or_acknowledgement_is_refused_by_its_length_alone(lengths: tuple[int, int]) -> None:
    """So are lengths that no memory holds."""
    parts, acks = TwoPartParser(SMALL), AckParser(SMALL)
    parts.feed(struct.pack(">QQQ", *lengths, 0))
    with pytest.raises(FrameError, match="part_size"):
        parts.next()
    acks.feed(b"\x00\x00\x00\x11")
    with pytest.raises(FrameError, match="ack_size"):
        acks.next()


def test_a_request_like_dynamos_is_understood() -> None:
    """The base of the refusals below."""
    assert read_request(request_with()).get("token_ids") == [1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": 3}, "control"),
        ({"request_type": "many_in"}, "control"),
        ({"response_type": "single_out"}, "control"),
        ({"payload_codec": "json"}, "codec"),
        ({"connection_info": {"transport": "tcp_response_mux_v1", "info": "{}"}}, "transport"),
        ({"connection_info": {"transport": "tcp_server", "info": "not JSON"}}, "return"),
        ({"info": {"stream_type": "request"}}, "return"),
        ({"info": {"context": "another"}}, "return"),
        ({"info": {"address": 4000}}, "return"),
        ({"info": {"address": "4000"}}, "address"),
        ({"info": {"subject": "127.0.0.1:4000"}}, "control"),
        ({"info": {"subject": "r"}}, "control"),
        ({"body": b""}, "body"),
        ({"body": b"\x90"}, "body"),
        ({"body": b"\xc1"}, "body"),
        ({"body": b"\x81\xa1a\xdd\xff\xff\xff\xff"}, "body"),
        ({"body": b"\x81\xa1a\x01\x01"}, "body"),
        ({"body": b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01"}, "body"),
        ({"checksum": 7}, "checksum"),
    ],
    ids=str,
)
def test_a_request_that_is_not_as_measured_is_refused_with_a_reason(
    changes: dict[str, object], reason: str
) -> None:
    """Its frame is whole, so that it can be handed on as it came."""
    assert refusal_of(request_with(**changes)) == reason


def test_a_request_without_a_codec_is_json_to_dynamo_and_refused() -> None:
    """Source: measured: an instance record without a codec is sent JSON; frames_request_json.bin."""
    (frame,) = requests_in(captured("request_json"))
    assert refusal_of(frame) == "codec"


@pytest.mark.parametrize(
    "payload",
    [b"", b"x" * 100, struct.pack(">QQQ", 2, 1, 0) + b"{}", struct.pack(">QQQ", 2, 0, 0) + b"{}\x80"],
)
def test_a_payload_that_is_no_two_part_frame_is_refused(payload: bytes) -> None:
    """Dynamo's worker acknowledges such a request and never answers it (measured)."""
    (frame,) = requests_in(request_frame("p", b"", payload))
    assert refusal_of(frame) == "two_part"


@pytest.mark.parametrize(
    "address", ["", ":1", "h", "h:", "h:0", "h:65536", "h:x", "h:1 ", "h:-1", "h:²", "h:000001"]
)
def test_an_address_without_a_port_is_refused(address: str) -> None:
    """Host and port, or a reason."""
    with pytest.raises(FrameError, match="address"):
        split_address(address)


def test_hosts_come_with_and_without_brackets() -> None:
    """Source: measured: Dynamo writes `::1:36645`; an instance record adds the path."""
    assert split_address("::1:36645") == ("::1", 36645)
    assert split_address("[::1]:36645") == ("::1", 36645)
    assert split_transport("127.0.0.1:65535/f2e4/generate") == ("127.0.0.1", 65535, "f2e4/generate")


def test_a_path_that_is_not_text_is_one_that_nobody_serves() -> None:
    """Dynamo's worker refuses such a request and keeps the connection (measured)."""
    (frame,) = requests_in(b"\x00\x02\xff/\x00\x00\x00\x00\x00\x00")
    assert frame.path == "\ufffd/"


def test_a_path_too_long_for_its_length_field_is_refused() -> None:
    """An instance record may say anything."""
    with pytest.raises(FrameError, match="path_size"):
        request_frame("p" * 65_536, b"", b"")


@pytest.mark.parametrize(
    "data", [two_part(b"{}"), two_part(b'"kill"'), two_part(b"", b"x"), two_part(b"{", b"x")]
)
def test_what_is_no_handshake_and_no_prologue_is_refused(data: bytes) -> None:
    """Each has its reason."""
    (part,) = parts_in(data)
    with pytest.raises(FrameError, match="handshake"):
        subject_of(part)
    with pytest.raises(FrameError, match="prologue"):
        error_of(part)


def test_a_handshake_or_prologue_with_a_body_is_refused() -> None:
    """Dynamo calls such a prologue malformed (measured)."""
    for header, read in ((handshake("s"), subject_of), (prologue(), error_of)):
        (part,) = parts_in(two_part(header[24:], b"x"))
        with pytest.raises(FrameError, match="body of 1 bytes"):
            read(part)
    (asking,) = parts_in(two_part(b'{"subject":"s","stream_type":"request"}'))
    with pytest.raises(FrameError, match="request"):
        subject_of(asking)


# --- any bytes, in any pieces


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def parsed(parser: RequestParser | AckParser | TwoPartParser, data: bytes, cuts: list[int]) -> list[object]:
    """Everything a parser makes of the pieces, the refusal last; what is held is checked on the way."""
    seen: list[object] = []
    try:
        for piece in pieces(data, cuts):
            parser.feed(piece)
            while (frame := parser.next()) is not None:
                seen.append(frame if isinstance(frame, str) else frame.raw)
            assert len(parser.pending) <= 24 + 2 * 64 + 2 * 48
    except FrameError as refused:
        seen.append(refused.reason)
    return seen


CUTS = st.lists(st.integers(0, 400), max_size=12)
NOISE = st.binary(max_size=200)


@pytest.mark.parametrize("kind", [RequestParser, AckParser, TwoPartParser])
@given(data=NOISE, cuts=CUTS)
@settings(derandomize=True, max_examples=300)
def test_any_bytes_are_parsed_or_refused_or_waited_for_however_they_are_split(
    kind: type[RequestParser | AckParser | TwoPartParser], data: bytes, cuts: list[int]
) -> None:
    """The pieces make no difference, and what is held stays within the bounds."""
    assert parsed(kind(SMALL), data, cuts) == parsed(kind(SMALL), data, [])


@given(
    frames=st.lists(
        st.tuples(st.text("ab/é", max_size=8), st.binary(max_size=32), st.binary(max_size=64)), max_size=4
    ),
    cuts=CUTS,
)
@settings(derandomize=True, max_examples=200)
def test_requests_come_out_as_they_went_in_however_they_are_split(
    frames: list[tuple[str, bytes, bytes]], cuts: list[int]
) -> None:
    """A round trip."""
    encoded = [request_frame(*frame) for frame in frames]
    assert parsed(RequestParser(SMALL), b"".join(encoded), cuts) == encoded


@given(parts=st.lists(st.tuples(st.binary(max_size=64), st.binary(max_size=64)), max_size=4), cuts=CUTS)
@settings(derandomize=True, max_examples=200)
def test_two_part_frames_come_out_as_they_went_in_however_they_are_split(
    parts: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    """A round trip."""
    encoded = [two_part(*part) for part in parts]
    assert parsed(TwoPartParser(SMALL), b"".join(encoded), cuts) == encoded


@given(
    at=st.integers(0, 1710), noise=st.binary(min_size=1, max_size=6), name=st.sampled_from(MSGPACK_REQUESTS)
)
@settings(derandomize=True, max_examples=600)
def test_a_damaged_request_is_read_or_refused_and_can_be_sent_on_if_it_was_read(
    at: int, noise: bytes, name: str
) -> None:
    """No other exception, wherever the damage is; every field can be asked for."""
    data = bytearray(captured(name))
    data[at % len(data) : at % len(data) + len(noise)] = noise
    try:
        for frame in requests_in(bytes(data)):
            request = read_request(frame)
            (sent,) = requests_in(request.sent_to("1/generate", "127.0.0.1:9", {"routing": {"dp_rank": 0}}))
            assert read_request(sent).get("routing") == {"dp_rank": 0}
            for field in ("model", "token_ids", "sampling_options", "annotations", "bootstrap_info"):
                request.get(field)
    except FrameError as refused:
        assert refused.reason  # noqa: PT017 - either end is fine, no other exception is


@given(body=st.binary(max_size=60), text=st.text(max_size=20))
@settings(derandomize=True, max_examples=400)
def test_any_body_and_any_text_in_the_control_are_read_or_refused(body: bytes, text: str) -> None:
    """Also msgpack values that Python has no word for."""
    try:
        frame = request_with(id=text, info={"context": text, "subject": text + "s"}, body=b"\x81\xa1a" + body)
        request = read_request(frame)
        assert request.id == text
        assert request.subject == text + "s"
        assert request.sent_to("a/generate", "127.0.0.1:4000") == frame.raw
        request.get("a")
    except FrameError as refused:
        assert refused.reason in {"body", "control"}  # noqa: PT017 - the same


@given(data=st.binary(max_size=60))
@settings(derandomize=True, max_examples=300)
def test_any_first_frames_of_an_answer_are_read_or_refused(data: bytes) -> None:
    """Their headers are JSON of two known shapes or a reason."""
    part = TwoPart(raw=b"", header=data, body=b"")
    for read, reason in ((subject_of, "handshake"), (error_of, "prologue")):
        with pytest.raises(FrameError) as refused:
            read(part)
        assert refused.value.reason == reason
    assert (part.control is None) == (data not in {b'"stop"', b'"kill"', b'"sentinel"'})
