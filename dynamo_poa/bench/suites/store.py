"""What of a suite is kept, and what of it is done already.

Owns: the file of a suite's results: its form, that a line is there whole or not at all, what is read of one
      that was cut short, when a file may be gone on with.
Does not own: which cells a suite has (catalogue.py), their order (runner.py), what is made of them (page.py).
Invariant: a file opens with one Stamp and holds results of that build and machine alone. Every cell that was
           asked for is in it from the start, marked as not run, until its result comes. What was finished
           stays whatever comes after: a full disk, a kill, a line that cannot be read.
"""

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from dynamo_poa.bench.suites.cells import Cell, NotANumber, Result, Stamp
from dynamo_poa.errors import ConfigError, PoaError

SUFFIX = ".jsonl"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_RUN = "not run: the run ended before its turn"


class StoreError(PoaError):
    """Stop: results cannot be written. What was written before is whole."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A file of results as it was read.

    results:   the latest of each cell, in the order in which they came
    problems:  lines that are no results, with the reason; their cells count as not run
    """

    stamp: Stamp
    results: tuple[Result, ...]
    problems: tuple[str, ...] = ()

    @property
    def done(self) -> dict[str, Result]:
        """Return the results that need no other run, by their cells' ids."""
        return {result.cell.id: result for result in self.results if result.state == "done"}


def read(path: Path) -> Contents:
    """Read a file of results.

    Raises:  ConfigError when it cannot be read, does not open with a stamp, or opens with another suite's.
    """
    try:
        first, *lines = path.read_bytes().split(b"\n")
        stamp = msgspec.json.decode(first, type=Stamp)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except msgspec.MsgspecError as error:
        raise ConfigError([f"{path}, line 1: no stamp of a build, so no file of results: {error}"]) from error
    if stamp.suite != path.stem:
        raise ConfigError([f"{path}: its stamp says suite {stamp.suite!r}: must be the file's name"])
    results: dict[str, Result] = {}
    problems = []
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        try:
            result = msgspec.json.decode(line, type=Result)
        except (msgspec.MsgspecError, NotANumber, UnicodeDecodeError) as error:
            problems.append(f"{path}, line {number}: no result: {error}")
        else:
            results.pop(result.cell.id, None)
            results[result.cell.id] = result
    return Contents(stamp=stamp, results=tuple(results.values()), problems=tuple(problems))


def read_all(folder: Path) -> tuple[Contents, ...]:
    """Read every file of results in a folder, by name.

    Raises:  ConfigError when there is none, or one is none.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ConfigError([f"{folder}: must be a folder with files of results (*{SUFFIX}) of `bench run`"])
    return tuple(read(path) for path in paths)


class Store:
    """The file of one suite, open for more results."""

    def __init__(self, path: Path, contents: Contents, lock: int) -> None:
        self.path, self.contents, self._lock = path, contents, lock
        self._file = path.open("ab", buffering=0)

    @classmethod
    def open(cls, folder: Path, stamp: Stamp, cells: Iterable[Cell], *, fresh: bool = False) -> Self:
        """Open a suite's file, new or where it stopped; what it held is then in `contents`.

        The stamp of what is asked now replaces the one of then, except for when it was begun. Of cells that
        are not asked for now, those that are done stay.

        Args:     cells: that are asked for; those without a result are marked as not run.
                  fresh: sets aside what is there, under the name it then has, and begins anew.
        Raises:   ConfigError when results of another build or machine are there, another run writes there, or
                  the folder cannot be written to.
                  StoreError when its disk is full.
        """
        path = folder / f"{stamp.suite}{SUFFIX}"
        contents = Contents(stamp=stamp, results=())
        lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
            if fresh and path.exists():
                path.replace(_aside(path))
            if path.exists():
                contents = read(path)
                _check_same_build(path, contents.stamp, stamp)
                stamp = msgspec.structs.replace(stamp, started_at=contents.stamp.started_at)
                contents = msgspec.structs.replace(contents, stamp=stamp)
            asked = {cell.id: cell for cell in cells}
            kept = {r.cell.id: r for r in contents.results if r.state == "done" or r.cell.id in asked}
            missing = (cell for key, cell in asked.items() if key not in kept)
            marks = (Result(cell=cell, state="failed", reason=NOT_RUN) for cell in missing)
            contents = msgspec.structs.replace(contents, results=tuple(kept.values()))
            _write(path, (stamp, *contents.results, *marks))
            return cls(path, contents, lock)
        except OSError as error:
            _unlock(lock)
            if error.errno in _NO_ROOM:
                raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
            raise ConfigError([f"--out {folder}: cannot be written to: {error.strerror}"]) from error
        except PoaError:
            _unlock(lock)
            raise

    def add(self, result: Result) -> None:
        """Append a result: a whole line, on the disk when this returns.

        Raises:  StoreError when it cannot be; the file is then as it was before.
        """
        line = msgspec.json.encode(result) + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):  # the rest would not fit either
                raise OSError(None, f"no room for more than {written} of {len(line)} bytes")
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), before)
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; others may write to the folder."""
        self._file.close()
        _unlock(self._lock)

    def __enter__(self) -> Self:
        """Give the store."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        self.close()


def _check_same_build(path: Path, there: Stamp, now: Stamp) -> None:
    """Refuse to mix what cannot be compared."""
    changed = [
        f"{name} was {was!r} and is {now_is!r}"
        for name, was, now_is in (
            ("commit", there.machine.commit, now.machine.commit),
            ("processor", there.machine.processor, now.machine.processor),
            ("cores", there.machine.cores, now.machine.cores),
            *(
                (package, there.machine.packages.get(package), version)
                for package, version in now.machine.packages.items()
            ),
        )
        if was != now_is
    ]
    if changed:
        raise ConfigError(
            [f"{path}: {', '.join(changed)}: choose another --out, or --fresh to set its results aside"]
        )


def _lock(folder: Path) -> int:
    """Keep other runs from the folder: they would take the file from under this one.

    Raises:  ConfigError when another run is there.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError([f"{folder}: another run writes there: choose another --out"]) from error
    return lock


def _unlock(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def _aside(path: Path) -> Path:
    """Return a name that is free and that no reader of the folder takes for results."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _write(path: Path, records: Iterable[Stamp | Result]) -> None:
    """Replace a file in one step."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            for record in records:
                file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
