"""Whether a numbered message is new, late or a repeat, what is missing, and whose life it belongs to.

Owns: the place of each number in a stream that counts up by one, as publishers, events and passes do; which
      of a rank's publishers is the living one.
Does not own: what a late or missing message means for the state it would have changed.
Invariant: a number is taken at most once, and memory does not grow with the size of a gap.
Source: measured: Dynamo's counters are consecutive; router `kv_metrics` arrive reordered by a few places.
"""

from enum import Enum, auto
from math import inf

MAX_AWAITED = 1024  # measured reordering spans 3 messages; what is further behind will not come
# A publisher that was replaced speaks no more, but what it said may still be on its way; after an outage of
# the bus that comes at once. One that is heard so much later has not been replaced.
REPLACED_S = 60.0
MAX_REPLACED = 8
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


class Life(Enum):
    """Which life of a rank a message belongs to."""

    SAME = auto()
    NEW = auto()  # the rank has been restarted, or speaks for the first time
    PAST = auto()  # overtaken by a restart


class Speaker:
    """Who speaks for a rank on one topic: one publisher at a time, and another after each restart.

    publisher_id:  the living one, None before the first
    """

    __slots__ = ("_replaced", "publisher_id")

    def __init__(self) -> None:
        self.publisher_id: int | None = None
        self._replaced: dict[int, float] = {}

    def hear(self, publisher_id: int, at_s: float) -> Life:
        """Take note of who speaks and return which life this is."""
        if publisher_id == self.publisher_id:
            return Life.SAME
        if at_s - self._replaced.get(publisher_id, -inf) <= REPLACED_S:
            return Life.PAST
        self._replaced.pop(publisher_id, None)
        if self.publisher_id is not None:
            self._replaced[self.publisher_id] = at_s
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
        self.publisher_id = publisher_id
        return Life.NEW
