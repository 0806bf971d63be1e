"""Decides which failed requests of a soak are excused by a process that was killed, and whether it went well.

Owns: the verdict on each request, the goals, the figure.
Does not own: the run (soak.py), drawing (report.py).
Invariant: pure. A failure is lost unless a process it was on was killed in its lifetime: a worker by a
           decision for it, the last of its leg or an earlier one, which is counted apart; a router by who
           sent a leg's last decision. SIGTERM and NATS excuse nothing.
Source: issue 4: 0 requests lost beyond those that were on a killed worker or router. Decisions of a router's
        last 50 ms die with it, so of a request without one only the time can be told.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from dynamo_poa.bench.load import Result
from dynamo_poa.bench.memory import slope
from dynamo_poa.bench.report import Figure, Measure, at_least, at_most, plain
from dynamo_poa.values import Role

DYING_S = 0.05  # from the signal until a process has gone
# A killed router stays in discovery's folder for 10 s, and a frontend follows a moment later.
LISTED_S = 12.0
REFUSED = "HTTP 500"  # what a frontend makes of a router it cannot connect to; measured
HUNG = "no end within"  # how the load client says so
FLAT_MB = 5.0
FLAT_SOCKETS = 16.0
# A router process is judged from this age on: Dynamo's own trees, of caches and of bookings, keep their empty
# nodes until it sweeps them, every 5 minutes. Measured: what they grew by is free from then on.
SWEPT_S = 310.0
JUDGED_S = 180.0  # a shorter stretch does not tell growth from noise


class Verdict(StrEnum):
    """What became of a request."""

    OK = "ok"
    KILLED_WORKER = "was on a killed worker"
    RETRY_FAILED = "was on a killed worker, and its retry failed too"
    KILLED_ROUTER = "was on a killed router"
    DEAD_ROUTER = "sent by the frontend to a router already killed"
    LOST = "lost"


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One process that was ended, and what it was to the requests on it. Instants are monotonic.

    back_s:  until the graph was whole again
    """

    at_s: float
    process: str
    signal: str
    worker_ids: tuple[int, ...] = ()
    router_id: str = ""
    back_s: float = 0.0

    @property
    def killed(self) -> bool:
        """Tell whether it had no chance to say so."""
        return self.signal == "SIGKILL"


class Leg(msgspec.Struct, frozen=True):
    """The last decision for one leg of a request, and which router process made it.

    earlier:  the workers of the decisions before it
    """

    worker_id: int
    router_id: str
    earlier: tuple[int, ...] = ()


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A router process at one instant, seconds from the start of the load."""

    at_s: float
    router_id: str
    mb: float
    sockets: int
    in_flight: int
    relay: bool


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed request, to look into."""

    request_id: str
    verdict: Verdict
    error: str
    started_at_s: float
    latency_s: float
    tokens: int
    legs: dict[Role, Leg]


class Seen(msgspec.Struct, kw_only=True):
    """What a run has seen, and how long it was.

    quiet_s:     how long at the end routers were left alone, which is where growth is judged
    idle_before, idle_after:  sockets of each router process without load, by replica
    samples:     under load, oldest first
    last:        the last of each router process that lives, without load
    unasked:     restarts that were not ours
    """

    seconds: float
    quiet_s: float
    results: list[Result]
    legs: dict[str, dict[Role, Leg]]
    hits: list[Hit]
    samples: list[Sample]
    last: list[Sample]
    idle_before: dict[str, int]
    idle_after: dict[str, int]
    retries: int
    handed_on: Mapping[str, int]
    unasked: Mapping[str, int]
    busy_frac: float


def verdict(result: Result, legs: Mapping[Role, Leg], roles: Iterable[Role], hits: Iterable[Hit]) -> Verdict:
    """Judge one request by the processes it was on.

    Args:     legs: the last decision of each leg that is known.  roles: the legs it should have had.
    """
    if result.ok:
        return Verdict.OK
    ended_at_s = result.started_at_s + result.latency_s
    killed = [hit for hit in hits if hit.killed]
    meanwhile = [hit for hit in killed if result.started_at_s - DYING_S <= hit.at_s <= ended_at_s]
    if any(leg.worker_id in hit.worker_ids for hit in meanwhile for leg in legs.values()):
        return Verdict.KILLED_WORKER
    if any(worker in hit.worker_ids for hit in meanwhile for leg in legs.values() for worker in leg.earlier):
        return Verdict.RETRY_FAILED
    unknown = any(role not in legs for role in roles)
    on = {leg.router_id for leg in legs.values()}
    if any(hit.router_id and (unknown or hit.router_id in on) for hit in meanwhile):
        return Verdict.KILLED_ROUTER
    listed = [hit for hit in killed if hit.router_id and 0 <= result.started_at_s - hit.at_s <= LISTED_S]
    refused = result.error == REFUSED
    return Verdict.DEAD_ROUTER if refused and unknown and listed else Verdict.LOST


def failures(seen: Seen, roles: Iterable[Role]) -> list[Failure]:
    """Return every failed request with its verdict."""
    roles = tuple(roles)
    return [
        Failure(
            request_id=result.request_id,
            verdict=verdict(result, legs, roles, seen.hits),
            error=result.error,
            started_at_s=result.started_at_s,
            latency_s=result.latency_s,
            tokens=result.tokens,
            legs=legs,
        )
        for result in seen.results
        if not result.ok
        for legs in [seen.legs.get(result.request_id, {})]
    ]


def figure(seen: Seen, failed: Sequence[Failure], routers: int) -> Figure:
    """Turn what was seen into the figure; a goal that is not reached is a violation."""
    verdicts = Counter(failure.verdict for failure in failed)
    hung = sum(failure.error.startswith(HUNG) for failure in failed)
    signals = Counter(f"{hit.signal} {hit.process.rstrip('-0123456789')}" for hit in seen.hits)
    relayed = sum(one.relay for one in seen.last)
    excused = (Verdict.KILLED_WORKER, Verdict.RETRY_FAILED, Verdict.KILLED_ROUTER, Verdict.DEAD_ROUTER)
    measures = [
        plain("requests", "requests", len(seen.results), ""),
        plain("rps", "requests", len(seen.results) / seen.seconds, "/s"),
        *(plain(one.name.lower(), f"failed: {one}", verdicts[one], "") for one in excused),
        at_most("lost", "failed: lost", verdicts[Verdict.LOST], "", 0),
        at_most("hung", "of all failed: hung until the client gave up", hung, "", 0),
        at_least("hits", "processes killed or stopped", len(seen.hits), "", 1),
        at_most("unasked", "processes that ended by themselves", sum(seen.unasked.values()), "", 0),
        plain("retries", "sent to a second worker", seen.retries, ""),
        at_most("handed_on", "frames not understood", sum(seen.handed_on.values()), "", 0),
        at_least("relay", "routers on the relay at the end", relayed, "", routers),
        at_most("in_flight", "in flight without load", sum(one.in_flight for one in seen.last), "", 0),
        *_growth(seen),
        plain("busy", "the machine's cores busy", seen.busy_frac * 100, "%"),
    ]
    errors = Counter((failure.verdict, failure.error) for failure in failed)
    back_s = sorted(hit.back_s for hit in seen.hits)
    return Figure(
        name="soak",
        title=f"{seen.seconds / 60:.1f} minutes of load while processes are killed and stopped",
        measures=tuple(measures),
        conditions=(
            "ended: " + ", ".join(f"{count} x {what}" for what, count in sorted(signals.items())),
            f"whole again after {back_s[len(back_s) // 2] if back_s else 0:.1f} s (median)",
            f"growth is that of the last {seen.quiet_s:.0f} s, in which no router is touched, of "
            f"processes older than {SWEPT_S:.0f} s: by then Dynamo has swept its own trees",
            *(f"{count} x {why}: {error}" for (why, error), count in sorted(errors.items())),
            *(f"frames not understood: {count} x {reason}" for reason, count in seen.handed_on.items()),
            *(f"ended by itself: {count} x {name}" for name, count in seen.unasked.items() if count),
        ),
    )


def _growth(seen: Seen) -> list[Measure]:
    """Judge memory and sockets of the routers that lived through the quiet end."""
    measures = []
    from_s = seen.seconds - seen.quiet_s
    for router_id in sorted({one.router_id for one in seen.last}):
        replica = router_id.rpartition("-")[0]  # without its pid
        own = [one for one in seen.samples if one.router_id == router_id]
        quiet = [one for one in own if one.at_s >= max(from_s, own[0].at_s + SWEPT_S)]
        if len(quiet) > 1:
            span_s = quiet[-1].at_s - quiet[0].at_s
            mb = slope([(one.at_s, one.mb) for one in quiet]) * span_s
            sockets = slope([(one.at_s, float(one.sockets)) for one in quiet]) * span_s
            of_mb = f"{replica}_growth_mb", f"{replica}: trend of memory", mb, "MB"
            of_sockets = f"{replica}_growth_sockets", f"{replica}: trend of open sockets", sockets, ""
            judged = span_s >= JUDGED_S
            measures += [
                plain(f"{replica}_mb", f"{replica}: memory at the end", quiet[-1].mb, "MB"),
                at_most(*of_mb, FLAT_MB) if judged else plain(*of_mb),
                at_most(*of_sockets, FLAT_SOCKETS) if judged else plain(*of_sockets),
            ]
        before, after = seen.idle_before[replica], seen.idle_after[replica]
        what = f"{replica}: sockets without load, {before} at first"
        measures.append(at_most(f"{replica}_idle_sockets", what, after, "", before + FLAT_SOCKETS))
    return measures
