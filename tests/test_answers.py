"""How an answer went, told from its bytes as they pass."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.answers import KEPT_BYTES, AnswerWatch
from dynamo_poa.frames import FINAL_BODY, control, handshake, prologue, two_part

FIXTURES = Path(__file__).parent / "fixtures"
BEGIN = handshake("s") + prologue()
FINAL = two_part(b"", FINAL_BODY)


def chunk(annotated: object) -> bytes:
    return two_part(b"", msgspec.msgpack.encode({"data": annotated, "complete_final": False}))


def fed(data: bytes, step: int = 1 << 20) -> AnswerWatch:
    watch = AnswerWatch()
    for at in range(0, len(data), step):
        watch.feed(data[at : at + step])
    return watch


def seen(watch: AnswerWatch) -> tuple[int, bool, str | None, bool]:
    return watch.data_frames, watch.final, watch.failure, watch.complete


@pytest.mark.parametrize("step", [1, 7, 24, 158, 1 << 20])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("response", (4, True, None, True)),
        ("response_prefill", (2, True, None, True)),
        ("response_raised_before_first", (1, True, "RuntimeError: raised before first", False)),
        ("response_raised_midway", (2, True, "ValueError: raised mid", False)),
        ("response_not_started", (0, False, None, False)),
        ("response_cancelled", (3, False, None, False)),
    ],
)
def test_captured_answers_are_told_apart_however_they_are_split(
    name: str, expected: tuple[int, bool, str | None, bool], step: int
) -> None:
    """An error ends as cleanly as a good answer; a cancelled one just stops. Source: frames_response*.bin."""
    assert seen(fed((FIXTURES / f"frames_{name}.bin").read_bytes(), step)) == expected


def test_the_final_frame_alone_makes_an_answer_complete() -> None:
    """Source: measured: a requester does not need the sentinel, and takes no answer without a final frame."""
    data = BEGIN + chunk({"data": {"finish_reason": "stop"}})
    assert fed(data + FINAL).complete
    assert not fed(data + control("sentinel")).complete
    assert not fed(data + FINAL[:-1]).complete
    assert fed(data + FINAL + control("sentinel")).complete


def test_an_engines_error_is_a_mapping_in_finish_reason() -> None:
    """As on the stream path. Source: dynamo_poa/router.py."""
    assert seen(fed(chunk({"data": {"finish_reason": {"error": "no blocks"}}}) + FINAL)) == (
        1,
        True,
        "no blocks",
        False,
    )
    assert fed(chunk({"data": {"finish_reason": {"odd": 1}}}) + FINAL).failure == "no message"
    assert fed(chunk({"event": "error"}) + FINAL).failure == "no message"
    assert fed(chunk({"event": "comment", "data": {"finish_reason": None}}) + FINAL).complete


@pytest.mark.parametrize(
    "body", [b"", b"\x01", b"\x80", b"\x81\xa4data\x93\x01\x02\x03", b"\x81\xa4data\xc1"]
)
def test_a_chunk_that_is_no_map_is_no_error(body: bytes) -> None:
    """Handlers may yield anything."""
    assert seen(fed(two_part(b"", body) + FINAL)) == (1, True, None, True)


def test_a_large_frame_is_counted_and_not_kept() -> None:
    """Memory is bounded whatever a worker sends; a token's chunk after it is read again."""
    watch = AnswerWatch()
    large = two_part(b"", b"x" * (100 * KEPT_BYTES))
    for at in range(0, len(large), 10_000):
        watch.feed(large[at : at + 10_000])
        assert watch.held_bytes < 24
    assert watch.data_frames == 1
    watch.feed(large + chunk({"event": "error", "error": {"message": "late"}}) + FINAL)
    assert seen(watch) == (3, True, "late", False)


def test_a_frame_may_follow_whole_frames_of_data_alone() -> None:
    """Not part of one, nor the sentinel, behind which no requester reads."""
    watch = AnswerWatch()
    chunk = two_part(b"", b"\x80")
    for data, between in (
        (chunk, True),
        (chunk[:9], False),
        (chunk[9:30], True),
        (control("sentinel"), False),
    ):
        watch.feed(data)
        assert watch.between_frames is between, data


def test_data_after_the_final_frame_is_no_answer() -> None:
    """Only the sentinel may follow."""
    watch = fed(FINAL + control("sentinel"))
    assert not watch.lost
    watch.feed(chunk({}))
    assert watch.lost


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(derandomize=True, max_examples=400)
def test_any_bytes_are_followed_however_they_are_split(data: bytes, cuts: list[int]) -> None:
    """Never an exception, never an endless loop, and the pieces make no difference."""
    whole, pieces = fed(BEGIN + data), fed(BEGIN)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        pieces.feed(data[start:end])
    assert (seen(pieces), pieces.lost) == (seen(whole), whole.lost)


@given(
    bodies=st.lists(st.binary(max_size=80).filter(lambda body: body != FINAL_BODY), max_size=6),
    step=st.integers(1, 200),
)
@settings(derandomize=True, max_examples=200)
def test_any_data_frames_are_counted_and_none_is_an_end(bodies: list[bytes], step: int) -> None:
    """Whatever else is in them."""
    data = BEGIN + b"".join(two_part(b"", body) for body in bodies)
    assert seen(fed(data, step)) == (len(bodies), False, None, False)
    assert fed(data + FINAL, step).final


@given(reason=st.binary(max_size=40))
@settings(derandomize=True, max_examples=300)
def test_any_finish_reason_is_read_or_passed_over(reason: bytes) -> None:
    """Also one that msgpack allows and Python does not."""
    body = b"\x81\xa4data\x81\xa4data\x81\xadfinish_reason" + reason
    watch = fed(two_part(b"", body) + FINAL)
    assert watch.final
    assert watch.failure is None or watch.failure == "no message"
