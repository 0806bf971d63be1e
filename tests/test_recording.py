"""Recordings: what is written is read back, and what cannot be read is counted by reason."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from dynamo_poa.errors import RecordingError
from dynamo_poa.recording import MAX_LINE_BYTES, Header, Line, Reader, Writer

HEADER = Header(recording=1, namespace="poa", started_at_s=1_800_000_000.5, version="0.1.0")
FIXTURE_LINE = b'{"t":1.5,"subject":"a.b","data":"/w=="}\n'


def read(path: Path) -> tuple[Reader, list[Line]]:
    reader = Reader(path)
    return reader, list(reader)


def test_what_is_written_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    """Invariant: any bytes survive, and so does an instant to the microsecond."""
    path, every_byte = tmp_path / "r.ndjson", bytes(range(256))
    with Writer(path, HEADER) as writer:
        writer.write(1_800_000_001.123456, "poa.poa.decisions", every_byte)
        writer.write(1_800_000_002.0, "a", b"")
    reader, lines = read(path)
    assert lines == [
        Line(1_800_000_001.123456, "poa.poa.decisions", every_byte),
        Line(1_800_000_002.0, "a", b""),
    ]
    assert (reader.header, reader.lines, reader.skipped) == (HEADER, 3, {})
    assert (writer.messages, writer.written_bytes) == (2, path.stat().st_size)


def test_a_line_is_json_that_other_tools_can_read(tmp_path: Path) -> None:
    """Format of tests/fixtures: t in epoch seconds, subject, standard base64."""
    path = tmp_path / "r.ndjson"
    with Writer(path, HEADER) as writer:
        writer.write(1.5, "a.b", b"\xff\x00")
    first, second = path.read_text().splitlines()
    assert json.loads(first) == {
        "recording": 1,
        "namespace": "poa",
        "started_at_s": 1_800_000_000.5,
        "version": "0.1.0",
    }
    assert json.loads(second) == {"t": 1.5, "subject": "a.b", "data": base64.b64encode(b"\xff\x00").decode()}


def test_a_message_is_in_the_file_after_a_flush(tmp_path: Path) -> None:
    """Written as it comes: a reader does not wait for the end."""
    path = tmp_path / "r.ndjson"
    with Writer(path, HEADER) as writer:
        writer.write(1.5, "a.b", b"\xff")
        writer.flush()
        assert path.read_bytes().splitlines(keepends=True)[1] == FIXTURE_LINE


def test_a_file_without_header_is_read(tmp_path: Path) -> None:
    """The fixtures have none."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(FIXTURE_LINE * 2)
    reader, lines = read(path)
    assert lines == [Line(1.5, "a.b", b"\xff")] * 2
    assert reader.header is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{\n", "not_json"),
        (b"\n", "not_json"),
        (b"\xff\xfe\n", "not_json"),
        (b'{"x":' + b"[" * 100_000 + b"\n", "not_json"),
        (b'{"t":1.5,"subject":"a.b","data":"%"}\n', "not_a_message"),
        (b'{"t":-1,"subject":"a.b","data":""}\n', "not_a_message"),
        (b'{"t":1e999,"subject":"a.b","data":""}\n', "not_a_message"),
        (b'{"subject":"a.b","data":""}\n', "not_a_message"),
        (b"[]\n", "not_a_message"),
        (b'{"t":1,"subject":"a","data":"' + b"A" * (2 * MAX_LINE_BYTES) + b'"}\n', "too_long"),
    ],
)
def test_a_bad_line_is_counted_and_the_next_is_read(tmp_path: Path, bad: bytes, reason: str) -> None:
    """Bad input is counted by reason, and costs itself only."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(FIXTURE_LINE + bad + FIXTURE_LINE)
    reader, lines = read(path)
    assert len(lines) == 2
    assert reader.skipped == {reason: 1}


def test_a_compressed_recording_is_read(tmp_path: Path) -> None:
    """The fixtures are, and what a person attaches to a report is."""
    path = tmp_path / "r.ndjson.gz"
    path.write_bytes(gzip.compress(FIXTURE_LINE * 2))
    reader, lines = read(path)
    assert lines == [Line(1.5, "a.b", b"\xff")] * 2
    assert reader.skipped == {}


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, -9), slice(None, 150)])
def test_of_a_damaged_compressed_recording_the_beginning_is_read(tmp_path: Path, cut: slice) -> None:
    """What can be read is used, the rest is counted and named."""
    path = tmp_path / "r.ndjson.gz"
    random = b"".join(b'{"t":%d,"subject":"a.b","data":"/w=="}\n' % (n * n * 7919 % 10007) for n in range(90))
    path.write_bytes(gzip.compress(random)[cut])
    reader, lines = read(path)
    assert lines[0] == Line(0.0, "a.b", b"\xff")
    assert reader.skipped["gzip_damaged"] == 1


@pytest.mark.parametrize("cut", [1, 5, len(FIXTURE_LINE) - 2])
def test_a_last_line_cut_off_is_counted_as_truncated(tmp_path: Path, cut: int) -> None:
    """A recorder that was killed leaves half a line."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(FIXTURE_LINE + FIXTURE_LINE[:cut])
    reader, lines = read(path)
    assert len(lines) == 1
    assert reader.skipped == {"truncated": 1}


def test_a_last_line_without_its_newline_is_read(tmp_path: Path) -> None:
    """Nothing of the message is missing."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(FIXTURE_LINE + FIXTURE_LINE[:-1])
    reader, lines = read(path)
    assert lines == [Line(1.5, "a.b", b"\xff")] * 2
    assert reader.skipped == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, not a recording"),
        (b"root:x:0:0\n", "not a recording: its first line is neither a header nor a message"),
        (b"\x1f\x8b\x08\x00", "not a recording: its first line is neither a header nor a message"),
        (b'{"recording":2,"namespace":"poa"}\n', "recording format 2: must be 1"),
        (b'{"recording":1}\n', "not a recording: its first line is neither a header nor a message"),
    ],
)
def test_an_empty_or_foreign_file_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    """One clear line naming the file."""
    path = tmp_path / "r.ndjson"
    path.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {message}"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """One clear line naming the file."""
    with pytest.raises(RecordingError) as caught:
        read(tmp_path / "none")
    assert str(caught.value) == f"{tmp_path / 'none'}: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/full", "/dev/full: cannot be written: No space left on device"),
        ("/", "/: cannot be written: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_at_once(path: str, message: str) -> None:
    """Before anybody has recorded for an hour."""
    with pytest.raises(RecordingError) as caught, Writer(Path(path), HEADER):
        pytest.fail("the file was taken for writable")
    assert str(caught.value) == message
