"""What trials have shown lately, and when that counts no more.

Owns: what is remembered of a trial; which setting is the best known under the present load; which candidates
      need not be tried again; forgetting.
Does not own: trials (trial.py), which candidate is next (auto.py).
Invariant: bounded. What was seen under another load is no evidence: other regime, other resource that
           saturates, arrival rate or prompt size moved by more than half.
Source: issue 6.
"""

from typing import NamedTuple

import msgspec

from dynamo_poa.decisions import Traffic
from dynamo_poa.values import Regime, Setting

REMEMBERED = 0.25  # of a clear verdict's strength; less is forgotten: two half-lives
UNDECIDED_STRENGTH = 0.5  # half a reason: forgotten a half-life earlier
MOVED_FRAC = 0.5
MAX_ENTRIES = 64
LOAD_HALF_LIFE_S = 15.0


class Key(NamedTuple):
    """The conditions a trial speaks for."""

    regime: Regime
    resource: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival rate in requests/s and mean prompt in tokens to compute, smoothed; None while unknown.

    age_s:  how long it has been watched; all of it counts alike while that is short
    """

    at_s: float | None = None
    age_s: float = 0.0
    arrival_rate: float | None = None
    tokens_mean: float | None = None

    def next(self, traffic: Traffic, at_s: float) -> "Load":
        """Return it a view later."""
        passed_s = 0.0 if self.at_s is None else max(at_s - self.at_s, 0.0)
        age_s = self.age_s + passed_s
        weight = max(1 - 0.5 ** (passed_s / LOAD_HALF_LIFE_S), passed_s / age_s if age_s else 1.0)
        return Load(
            at_s=at_s,
            age_s=age_s,
            arrival_rate=_smoothed(self.arrival_rate, traffic.arrival_rate, weight),
            tokens_mean=_smoothed(self.tokens_mean, traffic.tokens_mean, weight),
        )

    def has_moved(self, since: "Load") -> bool:
        """Tell whether it is another load than it was."""
        pairs = ((self.arrival_rate, since.arrival_rate), (self.tokens_mean, since.tokens_mean))
        return any(
            now is not None and then is not None and abs(now - then) > MOVED_FRAC * then
            for now, then in pairs
        )


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that won against `base`, or did not.

    strength:  when it was noted; 1 is one clear verdict
    """

    key: Key
    setting: Setting
    base: Setting
    won: bool
    strength: float
    at_s: float
    load: Load


Memory = tuple[Entry, ...]


def remember(memory: Memory, entry: Entry) -> Memory:
    """Return the memory with one more entry, in place of one of the same comparison."""
    others = [known for known in memory if _comparison(known) != _comparison(entry)]
    return (*others[-MAX_ENTRIES + 1 :], entry)


def forget(memory: Memory, key: Key, load: Load, at_s: float, half_life_s: float) -> Memory:
    """Return what still counts; whether the load has moved can be told of the present conditions only."""
    return tuple(
        entry
        for entry in memory
        if entry.strength * 0.5 ** (max(at_s - entry.at_s, 0.0) / half_life_s) >= REMEMBERED
        and not (entry.key == key and load.has_moved(entry.load))
    )


def best_known(memory: Memory, key: Key) -> Setting | None:
    """Return the setting that won last under these conditions."""
    return next((entry.setting for entry in reversed(memory) if entry.won and entry.key == key), None)


def inherited(memory: Memory, old: Key, new: Key, at_s: float) -> Memory:
    """Return the memory after a change of conditions for which nothing is known yet.

    What won under the old ones stays for half as long: it may be what has lowered the regime, and to drop it
    would raise the regime again.
    """
    known = next((entry for entry in reversed(memory) if entry.won and entry.key == old), None)
    if (
        known is None
        or best_known(memory, new) is not None
        or has_lost(memory, new, known.setting, known.base)
    ):
        return memory
    entry = msgspec.structs.replace(known, key=new, strength=UNDECIDED_STRENGTH, at_s=at_s)
    return remember(memory, entry)


def has_lost(memory: Memory, key: Key, setting: Setting, base: Setting) -> bool:
    """Tell whether a setting need not be tried against another."""
    return any(
        not entry.won and (entry.key, entry.setting, entry.base) == (key, setting, base) for entry in memory
    )


def _comparison(entry: Entry) -> tuple[Key, Setting, Setting]:
    return entry.key, entry.setting, entry.base


def _smoothed(before: float | None, now: float | None, weight: float) -> float | None:
    if now is None or not 0 <= now < float("inf"):
        return before
    return now if before is None else before + weight * (now - before)
