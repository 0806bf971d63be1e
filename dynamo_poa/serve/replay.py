"""What PoA-hat, speeds, TTFT and outcomes a recording shows, by the code that judges them live.

Owns: the periods, what an estimate of the whole recording is.
Does not own: playing the recording (playback.py), PoA-hat (estimator.py, frozen.py), the report's looks
              (report.py).
Invariant: the same recording gives the same report; what was not understood is in it, counted and named.
"""

import math
import sys
from pathlib import Path

import msgspec

from dynamo_poa.config import ControllerConfig
from dynamo_poa.decisions import MAX_SAMPLES, DecisionLog
from dynamo_poa.estimator import MarginalEstimator
from dynamo_poa.frozen import METHOD, frozen_estimate
from dynamo_poa.serve.playback import Instant, Playback
from dynamo_poa.serve.report import Period, Report
from dynamo_poa.serve.speeds import Speeds
from dynamo_poa.snapshot import price
from dynamo_poa.values import Estimate, Role, Shares

_SHARES = (*Shares.__struct_fields__, "residual_frac")
PERIOD_S = 5.0  # a multiple of the time between two snapshots


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


class _Periods:
    """Prices instants as they come and closes a period when one of a later period comes."""

    def __init__(self, log: DecisionLog) -> None:
        self.closed: list[Period] = []
        self.whole = MarginalEstimator(math.inf)
        self._live = MarginalEstimator(ControllerConfig().estimate_window_s)
        self._log = log
        self._from_s = 0.0
        self._batches = 0

    def take(self, instant: Instant) -> None:
        """Take in the snapshots of an instant; what was decided before it is in the log already."""
        prices = [price(snapshot) for snapshot in instant.snapshots]
        self._live.add(prices)
        self.whole.add(prices)
        if instant.at_s >= self._from_s + PERIOD_S:
            self.close()
            self._from_s = instant.at_s - instant.at_s % PERIOD_S

    def close(self) -> None:
        """Close the period that is open; one without decisions is none."""
        to_s = self._from_s + PERIOD_S
        self._log.advance(to_s)
        ttft, decided = self._log.take_ttft(), self._log.batches > self._batches
        self._batches = self._log.batches
        if decided:
            self.closed.append(
                Period(
                    from_s=self._from_s,
                    to_s=to_s,
                    poa=self._live.estimate(to_s),
                    frozen=frozen_estimate(self._log.windows()),
                    ttft=ttft,
                )
            )


def replay(path: Path, *, window: int, block_size: int) -> Report:
    """Replay a recording on its own clock.

    Args:    window: decisions of each leg that the frozen estimate is computed over.
    Raises:  RecordingError when the file is not a recording, or nothing in it is of use.
    """
    config, speeds = ControllerConfig(), Speeds()

    def log_of(window: int, ttft_window_s: float, stale_s: float, answering: frozenset[Role]) -> DecisionLog:
        return DecisionLog(
            window=window,
            ttft_window_s=ttft_window_s,
            stale_s=stale_s,
            block_size=block_size,
            answering=answering,
        )

    playback = Playback(
        path,
        block_size=block_size,
        make_log=lambda answering: log_of(window, PERIOD_S, config.stale_s, answering),
        also=lambda data, at_s: whole.receive(data, at_s),
        on_pass=speeds.take_pass,
    )
    whole = log_of(sys.maxsize, math.inf, math.inf, playback.answering)  # 0.3 kB a decision
    periods = _Periods(playback.log)
    for instant in playback.instants():
        periods.take(instant)
    periods.close()
    ttft = whole.take_ttft()
    notes = playback.inexact
    if ttft.samples == MAX_SAMPLES:
        notes[f"TTFT of the last {MAX_SAMPLES} requests only"] = 1
    legs: dict[str, dict[str, int]] = {}
    for (role, outcome), count in sorted(whole.outcomes.items()):
        legs.setdefault(role, {})[outcome] = count
    workers = speeds.workers(playback.latencies.values())
    overall = Period(
        from_s=0.0,
        to_s=playback.at_s,
        poa=periods.whole.estimate(playback.at_s),
        frozen=_frozen_overall(whole, window),
        ttft=ttft,
    )
    return Report(
        header=playback.reader.header,
        window=window,
        block_size=block_size,
        estimate_s=config.estimate_s,
        estimate_window_s=config.estimate_window_s,
        overall=overall,
        periods=tuple(periods.closed),
        pools=speeds.pools(workers),
        workers=workers,
        legs=legs,
        messages=dict(playback.messages),
        unknown=dict(playback.unknown),
        skipped=dict(playback.reader.skipped),
        notes=notes,
    )


def _frozen_overall(log: DecisionLog, window: int) -> Estimate:
    """Return the frozen PoA-hat of all decisions.

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
        for role, leg in found.legs.items():
            if leg.poa_hat is not None:
                legs.setdefault(role, _Mean()).add(leg.poa_hat, leg.samples)
    if whole.value is None:
        return Estimate(reason=reasons[0] if reasons else "no decisions", method=METHOD)
    lacking = "" if legs.keys() == {str(role) for role in decided} else reasons[0]
    return Estimate(
        poa_hat=whole.value,
        samples=whole.samples,
        reason=lacking,
        method=METHOD,
        legs={
            role: Estimate(poa_hat=mean.value, samples=mean.samples, method=METHOD)
            for role, mean in legs.items()
        },
    )


def encode(report: msgspec.Struct) -> bytes:
    """Return a report as JSON with the digits that are the same on every machine, as not all of a double are.

    Figures have 9 significant digits; shares have 6 decimals, as they come from differences.
    """
    return msgspec.json.encode(_rounded("", msgspec.to_builtins(report)))


def _rounded(name: str, value: object) -> object:
    if isinstance(value, float) and name != "started_at_s":  # the header's is no figure
        return round(value, 6) if name in _SHARES else float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(name, item) for item in value]
    return value
