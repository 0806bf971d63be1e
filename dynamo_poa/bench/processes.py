"""What processes cost, as the kernel counts it.

Owns: reading processor time, memory and sockets of processes and processor time of the machine.
Does not own: which processes those are, what the numbers mean.
Source: proc(5).
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LISTENS = "0A"  # a state of TCP
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MachineTime(NamedTuple):
    """Processor time of the whole machine since its start, in seconds over all cores."""

    busy_s: float
    total_s: float


def cpu_s(pid: int) -> float:
    """Return the processor time a process has used, all threads, user and system."""
    # The name in parentheses may hold spaces; fields are counted after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return how much memory a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def machine_time() -> MachineTime:
    """Return how long the machine's cores have been busy; guests and steal count as busy.

    Niced processes count as idle time: they get what nobody else wants, 15 parts to 1024 at nice 19. Where
    this process is niced itself, so are those it started, and they count.
    """
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return machine_time_of(ticks, niced=os.getpriority(os.PRIO_PROCESS, 0) > 0)


def machine_time_of(ticks: Sequence[int], *, niced: bool) -> MachineTime:
    """Return what the machine's line of /proc/stat says to who is niced or is not.

    Args:     ticks: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    _, nice, _, idle, iowait, *_ = ticks
    rest = idle + iowait + (0 if niced else nice)
    return MachineTime((sum(ticks) - rest) / _TICKS_PER_S, sum(ticks) / _TICKS_PER_S)


def busy_frac(before: MachineTime, after: MachineTime) -> float:
    """Return the share of the machine's cores that was busy in between."""
    total_s = after.total_s - before.total_s
    return (after.busy_s - before.busy_s) / total_s if total_s > 0 else 0.0


def sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets a process holds open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(entry).partition(":[")
            if kind == "socket":
                found.add(int(inode[:-1]))
    return found


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports a process listens on."""
    held, found = sockets(pid), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and int(inode) in held:
                found.add(int(local.rpartition(":")[2], 16))
    return found
