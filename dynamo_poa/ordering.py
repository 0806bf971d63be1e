"""Whether a numbered message is new, late or a repeat, and what is missing.

Owns: the place of each number in a stream that counts up by one, as publishers, events and passes do.
Does not own: what a late or missing message means for the state it would have changed.
Invariant: a number is taken at most once, and memory does not grow with the size of a gap.
Source: measured: Dynamo's counters are consecutive; router `kv_metrics` arrive reordered by a few places.
"""

from enum import Enum, auto

MAX_AWAITED = 1024  # measured reordering spans 3 messages; what is further behind will not come
MAX_JUMP = 1_000_000  # no gap is this wide: the stream has been restarted, or one number was garbage


class Place(Enum):
    """Where a number stands in its stream."""

    NEW = auto()  # newer than all before
    LATE = auto()  # older than the newest, and awaited
    REPEATED = auto()  # taken before, or from before our time
    RESTARTED = auto()  # so far off that the stream must have begun anew; it counts from here


class Numbering:
    """One stream of numbers. The first number seen is no gap, whatever it is.

    newest:       the highest number taken, None before the first
    awaited:      numbers skipped and not yet given up
    given_up:     how many were skipped and will not be taken any more
    gaps_opened, gaps_closed:  times something began to be awaited, and times the last of it arrived
    repeated:     how many numbers came that were taken before
    """

    __slots__ = ("awaited", "gaps_closed", "gaps_opened", "given_up", "newest", "repeated")

    def __init__(self) -> None:
        self.newest: int | None = None
        self.awaited: set[int] = set()
        self.given_up = 0
        self.gaps_opened = 0
        self.gaps_closed = 0
        self.repeated = 0

    @property
    def missing(self) -> int:
        """Return how many numbers were skipped and have not come."""
        return self.given_up + len(self.awaited)

    def place(self, number: int) -> Place:
        """Take a number and return its place."""
        newest = self.newest
        if newest is None or number == newest + 1:
            self.newest = number
            return Place.NEW
        if abs(number - newest) > MAX_JUMP:
            self.restart()
            self.newest = number
            return Place.RESTARTED
        if number > newest:
            self._skip(newest + 1, number)
            self.newest = number
            return Place.NEW
        if number in self.awaited:
            self.awaited.remove(number)
            if not self.awaited:
                self.gaps_closed += 1
            return Place.LATE
        self.repeated += 1
        return Place.REPEATED

    def give_up(self, below: int | None = None) -> None:
        """Await nothing any more, or nothing below a number; what comes after all is a repeat."""
        dropped = {number for number in self.awaited if below is None or number < below}
        self.awaited -= dropped
        self.given_up += len(dropped)

    def restart(self) -> None:
        """Let the stream begin anew with its next number; the counts stay."""
        self.give_up()
        self.newest = None

    def _skip(self, first: int, end: int) -> None:
        if not self.awaited:
            self.gaps_opened += 1
        if len(self.awaited) + end - first > MAX_AWAITED:
            self.give_up()
            self.given_up += end - first
        else:
            self.awaited.update(range(first, end))
