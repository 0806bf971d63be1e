"""Which requests a trace file holds: Mooncake's JSON lines, read and written.

Owns: the format, what makes a line bad, how many bad lines are too many.
Does not own: arrival times as a load wants them (arrivals.py), which half is asked for (stream.py).
Invariant: a line is taken as it is or not at all; nothing is taken from a file with more than `MAX_BAD_FRAC`
           bad lines. Ids are numbered anew in order of appearance, so any integers will do.
Source: kvcache-ai/Mooncake: {"timestamp": ms, "input_length": tokens, "output_length": tokens,
        "hash_ids": one for each 512 tokens begun}. "session_id" and "delay" (ms) are Dynamo's addition;
        measured: `replay_concurrency` gives a session to one user, times without them are taken as they are.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import structlog

from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.request import Request

log = structlog.get_logger(__name__)

MAX_BAD_FRAC = 0.01
MAX_TOKENS = 1_000_000  # of a prompt and of an answer, as in synthetic.py; a simulator allots them at once
MAX_MS = 1e14  # 3,000 years: in seconds still exact to the millisecond
SHOWN_LINES = 5
_GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"
LINES_DROPPED = "poa.trace.lines_dropped"


class Row(msgspec.Struct, frozen=True):
    """One line of the file."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds.

    shown:  of the first bad lines, number and what is wrong
    """

    requests: int
    bad: int
    shown: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return what was left out, for a person; empty where nothing was."""
        if not self.bad:
            return ""
        return f"{self.bad} of {self.requests + self.bad} lines are bad and left out: {'; '.join(self.shown)}"


_DECODER = msgspec.json.Decoder(Row)
_ENCODER = msgspec.json.Encoder()


def survey(path: str | Path, block_tokens: int = 512) -> Survey:
    """Read the whole file and count its good and bad lines.

    Raises:  ConfigError when it cannot be read, holds no request, or has too many bad lines; it names the
             file, their number, the bound and the first of them.
    """
    good = bad = 0
    shown: list[str] = []
    for number, row in _lines(path, block_tokens):
        if isinstance(row, Row):
            good += 1
        else:
            bad += 1
            if len(shown) < SHOWN_LINES:
                shown.append(f"{path}:{number}: {row}")
    if bad > MAX_BAD_FRAC * (good + bad):
        share = f"{bad} of {good + bad} lines are bad ({bad / (good + bad):.2%})"
        raise ConfigError([f"trace {path}: {share}: must be <= {MAX_BAD_FRAC:.0%}", *shown])
    if not good:
        raise ConfigError([f"trace {path}: holds no request: must hold one at least"])
    if bad:
        log.warning(LINES_DROPPED, path=str(path), bad=bad, requests=good, first=shown)
    return Survey(requests=good, bad=bad, shown=tuple(shown))


def read(path: str | Path, block_tokens: int = 512, first_id: int = 0) -> Iterator[Request]:
    """Yield the file's good lines in order, `at_s` as the file has it; survey it first.

    Args:     first_id: of the first block that appears; the next new one is the next number.
    Raises:   ConfigError when the file cannot be read.
    """
    ids: dict[int, int] = {}
    for _, row in _lines(path, block_tokens):
        if isinstance(row, Row):
            yield Request(
                blocks=tuple(ids.setdefault(block, first_id + len(ids)) for block in row.hash_ids),
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                at_s=row.timestamp / 1000,
            )


def write_mooncake(requests: Iterable[Request], block_tokens: int, path: str | Path) -> int:
    """Write the requests, which must end, for a replay; return how many.

    Ids are numbered anew from 0. Without arrival times (a closed loop) the turns of a session are given as
    one: the simulator's user has all of them, each so long after the answer before it as the user thinks.
    With them every line stands alone: the simulator does not make a turn wait for the answer before it.

    Args:    block_tokens: that each of their ids stands for.
    Raises:  ConfigError when a request has another number of blocks than its tokens need.
    """
    ids: dict[int, int] = {}
    count = 0
    with Path(path).open("wb") as file:
        for request in requests:
            if problem := _blocks_problem(len(request.blocks), request.input_tokens, block_tokens):
                raise ConfigError([f"request {count}: {problem}"])
            line: dict[str, object] = {
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": [ids.setdefault(block, len(ids)) for block in request.blocks],
            }
            if request.at_s is not None:
                line["timestamp"] = round(request.at_s * 1000, 3)
            elif request.session >= 0:
                line |= {"session_id": str(request.session), "delay": round(request.think_s * 1000, 3)}
            file.write(_ENCODER.encode(line) + b"\n")
            count += 1
    return count


def _lines(path: str | Path, block_tokens: int) -> Iterator[tuple[int, Row | str]]:
    """Yield each line that is not blank: its number, and the row or what is wrong with it."""
    last_ms = 0.0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(_GZIP):
                    raise ConfigError([f"trace {path}: is compressed (gzip): must be plain text"])
                if number == 1:
                    line = line.removeprefix(_BOM)
                if not line.strip():
                    continue
                try:
                    row = _DECODER.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    yield number, str(error)
                    continue
                problem = _problem(row, block_tokens, last_ms)
                if not problem:
                    last_ms = row.timestamp
                yield number, problem or row
    except OSError as error:
        raise ConfigError([f"trace {path}: cannot be read: {error.strerror or error}"]) from error


def _problem(row: Row, block_tokens: int, last_ms: float) -> str:
    if row.timestamp < last_ms:
        return f"timestamp = {row.timestamp}: must be >= {last_ms:.15g}, the line before's"
    if row.timestamp > MAX_MS:
        return f"timestamp = {row.timestamp}: must be <= {MAX_MS:g} ms"
    for key, tokens in (("input_length", row.input_length), ("output_length", row.output_length)):
        if not 1 <= tokens <= MAX_TOKENS:
            return f"{key} = {tokens}: must be in [1, {MAX_TOKENS}]"
    return _blocks_problem(len(row.hash_ids), row.input_length, block_tokens)


def _blocks_problem(blocks: int, tokens: int, block_tokens: int) -> str:
    needed = -(-tokens // block_tokens)
    return "" if blocks == needed else f"hash_ids: {blocks} of them: must be {needed} for {tokens} tokens"
