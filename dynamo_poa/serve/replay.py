"""What PoA-hat, TTFT and outcomes a recording shows, by the code that judges them live.

Owns: the replay's clock (the recording's own), its periods, which leg's first token is the request's.
Does not own: the file format (recording.py), joining decisions (decisions.py), PoA-hat (estimator.py), the
              report's looks (report.py).
Invariant: the same recording gives the same report; what was not understood is in it, counted and named.
"""

import math
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_poa import wire
from dynamo_poa.config import ControllerConfig
from dynamo_poa.decisions import MAX_SAMPLES, DecisionLog
from dynamo_poa.errors import RecordingError, WireError
from dynamo_poa.frozen import METHOD, frozen_estimate
from dynamo_poa.recording import Reader
from dynamo_poa.serve.report import Period, Report
from dynamo_poa.values import Estimate, Role

PERIOD_S = 5.0
MAX_NAMED_SUBJECTS = 20  # of those we do not know; the rest of a foreign stream is one number
MAX_SUBJECT = 200  # characters shown of one
OURS = ("decisions", "params", "telemetry")

_decode_batch = msgspec.msgpack.Decoder(wire.DecisionBatch).decode


class _Mean:
    """A mean over windows, weighted by their samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._total = 0.0

    def add(self, value: float, samples: int) -> None:
        self._total += value * samples
        self.samples += samples

    @property
    def value(self) -> float | None:
        return self._total / self.samples if self.samples else None


class _Replay:
    """Feeds decisions to a log with the live window, and to one that keeps them all (0.3 kB each)."""

    def __init__(self, window: int, block_size: int, answering: frozenset[Role]) -> None:
        self.live = DecisionLog(
            window=window,
            ttft_window_s=PERIOD_S,
            stale_s=ControllerConfig().stale_s,
            block_size=block_size,
            answering=answering,
        )
        self.whole = DecisionLog(
            window=sys.maxsize,
            ttft_window_s=math.inf,
            stale_s=math.inf,
            block_size=block_size,
            answering=answering,
        )
        self.periods: list[Period] = []
        self._from_s: float | None = None

    def decisions(self, data: bytes, at_s: float) -> None:
        """Take in a batch, closing the period before it when it is of a later one."""
        if self._from_s is not None and at_s >= self._from_s + PERIOD_S:
            self.close()
        if self._from_s is None:
            self._from_s = at_s - at_s % PERIOD_S
        self.live.receive(data, at_s)
        self.whole.receive(data, at_s)

    def close(self) -> None:
        """Close the period that is open."""
        if self._from_s is None:
            return
        from_s, to_s = self._from_s, self._from_s + PERIOD_S
        self._from_s = None
        self.live.advance(to_s)
        windows = self.live.windows()
        self.periods.append(
            Period(
                from_s=from_s,
                to_s=to_s,
                poa=frozen_estimate(windows),
                poa_samples={str(role): len(window) for role, window in windows.items()},
                ttft=self.live.take_ttft(),
            )
        )


def replay(path: Path, *, window: int, block_size: int) -> Report:
    """Replay a recording on its own clock.

    Raises:  RecordingError when the file is not a recording.
    """
    if path.exists() and not path.is_file():
        raise RecordingError(f"{path}: must be a file: it is read twice")
    reader = Reader(path)
    replayed = _Replay(window, block_size, _answering(path))
    messages, unknown, notes = Counter[str](), Counter[str](), Counter[str]()
    first_at_s, at_s = None, 0.0
    for line in reader:
        first_at_s = line.at_s if first_at_s is None else first_at_s
        if line.at_s - first_at_s < at_s:
            notes["messages earlier than the one before"] += 1
        at_s = max(at_s, line.at_s - first_at_s)
        topic = _topic(line.subject)
        if topic is None:
            name = ascii(line.subject[:MAX_SUBJECT])  # it may be anything, a terminal's commands included
            unknown[name if name in unknown or len(unknown) < MAX_NAMED_SUBJECTS else "others"] += 1
            continue
        messages[topic] += 1
        if topic == "decisions":
            replayed.decisions(line.data, at_s)
    replayed.close()
    log, ttft = replayed.whole, replayed.whole.take_ttft()
    overall, overall_samples = _overall(log, window)
    notes.update({f"decisions refused: {reason}": count for reason, count in log.refused.items()})
    notes.update(
        {
            "decision batches lost": log.lost,
            "decision events dropped by routers": log.dropped,
            "decisions without candidates": log.unrecorded,
            "decisions with impossible candidates": log.unpriced,
            "requests given up, too many open": log.forgotten,
            f"TTFT of the last {MAX_SAMPLES} requests only": int(ttft.samples == MAX_SAMPLES),
        }
    )
    legs: dict[str, dict[str, int]] = {}
    for (role, outcome), count in sorted(log.outcomes.items()):
        legs.setdefault(role, {})[outcome] = count
    return Report(
        header=reader.header,
        window=window,
        block_size=block_size,
        overall=Period(from_s=0.0, to_s=at_s, poa=overall, poa_samples=overall_samples, ttft=ttft),
        periods=tuple(replayed.periods),
        legs=legs,
        messages=dict(messages),
        unknown=dict(unknown),
        skipped=dict(reader.skipped),
        notes={note: count for note, count in notes.items() if count},
    )


def _answering(path: Path) -> frozenset[Role]:
    """Return the legs whose first token is the request's: prefill's only where routers see no other leg."""
    answering = frozenset({Role.DECODE, Role.AGGREGATED})
    for line in Reader(path):
        if _topic(line.subject) != "decisions":
            continue
        with suppress(msgspec.DecodeError):  # counted by the replay itself
            if any(event.role in answering for event in _decode_batch(line.data).events):
                return answering
    return frozenset({Role.PREFILL})


def _topic(subject: str) -> str | None:
    """Return a subject's topic, None when it is neither Dynamo's nor ours."""
    tokens = subject.split(".")
    if len(tokens) == 3 and tokens[0] == "poa" and tokens[2] in OURS:
        return tokens[2]
    try:
        return wire.parse_subject(subject).topic
    except WireError:
        return None


def _overall(log: DecisionLog, window: int) -> tuple[Estimate, dict[str, int]]:
    """Return PoA-hat of all decisions, and how many of each leg are behind it.

        poa_hat = sum over consecutive windows of poa_hat * decisions / sum over them of decisions

    One window over everything would let the optimum put today's burst on yesterday's idle workers, and its
    price grows with the cube. Windows do not overlap; a last one too short for an estimate is left out.
    """
    whole, legs = _Mean(), dict[str, _Mean]()
    reasons = []
    decided = log.windows()
    for start in range(0, max(map(len, decided.values()), default=0), window):
        chunks = {role: decisions[start : start + window] for role, decisions in decided.items()}
        found = frozen_estimate({role: chunk for role, chunk in chunks.items() if chunk})
        reasons.append(found.reason)
        if found.poa_hat is not None:
            whole.add(found.poa_hat, found.samples)
        for role, chunk in chunks.items():
            if role in found.by_role:
                legs.setdefault(role, _Mean()).add(found.by_role[role], len(chunk))
    if whole.value is None:
        return Estimate(reason=reasons[0] if reasons else "no decisions"), {}
    by_role = {role: mean.value for role, mean in legs.items() if mean.value is not None}
    lacking = "" if by_role.keys() == decided.keys() else reasons[0]
    overall = Estimate(
        poa_hat=whole.value,
        samples=whole.samples,
        reason=lacking,
        method=METHOD,
        legs={role: Estimate(poa_hat=value, method=METHOD) for role, value in by_role.items()},
    )
    return overall, {role: mean.samples for role, mean in legs.items()}
