"""Whom a failed request of a soak is laid at, on worked cases: nothing is excused that need not be."""

import os
import socket

import msgspec
import pytest

from dynamo_poa.bench.load import Result
from dynamo_poa.bench.processes import listening_ports, sockets
from dynamo_poa.bench.soak import main
from dynamo_poa.bench.soak_report import Hit, Leg, Sample, Seen, Verdict, failures, figure, verdict
from dynamo_poa.values import Role

ROLES = (Role.PREFILL, Role.DECODE)
ON_1_AND_2 = {Role.PREFILL: Leg(1, "router-0-10"), Role.DECODE: Leg(2, "router-1-11")}


def result(error="stream cut", started_at_s=100.0, latency_s=2.0, request_id="a"):
    return Result(
        started_at_s=started_at_s,
        ttft_s=None,
        latency_s=latency_s,
        tokens=0,
        error=error,
        request_id=request_id,
    )


def worker_hit(worker_id, at_s=101.0, number="SIGKILL"):
    return Hit(at_s=at_s, process="decode-0", signal=number, worker_ids=(worker_id,))


def router_hit(router_id, at_s=101.0, number="SIGKILL"):
    return Hit(at_s=at_s, process="router-0", signal=number, router_id=router_id)


@pytest.mark.parametrize(
    ("hit", "judged"),
    [
        (worker_hit(1), Verdict.KILLED_WORKER),
        (worker_hit(2, at_s=99.96), Verdict.KILLED_WORKER),  # was dying when it began
        (worker_hit(2, at_s=99.9), Verdict.LOST),  # had gone before: to be retried elsewhere
        (worker_hit(2, at_s=102.1), Verdict.LOST),
        (worker_hit(3), Verdict.LOST),
        (worker_hit(1, number="SIGTERM"), Verdict.LOST),  # may drain
        (router_hit("router-1-11"), Verdict.KILLED_ROUTER),
        (router_hit("router-1-12"), Verdict.LOST),  # another process of the same name
        (router_hit("router-0-10", number="SIGTERM"), Verdict.LOST),
        (Hit(at_s=101.0, process="nats", signal="SIGKILL"), Verdict.LOST),
    ],
)
def test_a_failure_is_excused_only_by_a_killed_process_it_was_on(hit, judged):
    """Both legs known. Source: issue 4."""
    assert verdict(result(), ON_1_AND_2, ROLES, [hit]) is judged
    assert verdict(result(error=""), ON_1_AND_2, ROLES, [hit]) is Verdict.OK


def test_a_request_whose_retry_failed_after_its_worker_was_killed_is_counted_apart():
    """It was on a killed worker, and a router that can try again should have saved it."""
    again = {**ON_1_AND_2, Role.DECODE: Leg(2, "router-1-11", earlier=(7, 8))}
    assert verdict(result(), again, ROLES, [worker_hit(8)]) is Verdict.RETRY_FAILED
    assert verdict(result(), again, ROLES, [worker_hit(8), worker_hit(2)]) is Verdict.KILLED_WORKER
    assert verdict(result(), again, ROLES, [worker_hit(8, at_s=99.9)]) is Verdict.LOST
    assert verdict(result(), again, ROLES, [worker_hit(8, number="SIGTERM")]) is Verdict.LOST


def test_decisions_that_died_with_their_router_leave_only_the_time_to_judge_by():
    """A router's last 50 ms of decisions are never sent."""
    half = {Role.PREFILL: Leg(1, "router-1-11")}
    killed = router_hit("router-0-10")
    assert verdict(result(), half, ROLES, [killed]) is Verdict.KILLED_ROUTER
    assert verdict(result(), {}, ROLES, [killed]) is Verdict.KILLED_ROUTER
    assert verdict(result(), {}, ROLES, [worker_hit(1)]) is Verdict.LOST
    later = result("HTTP 500", started_at_s=104.0)
    assert verdict(later, half, ROLES, [killed]) is Verdict.DEAD_ROUTER  # still in discovery
    assert verdict(later, ON_1_AND_2, ROLES, [killed]) is Verdict.LOST
    assert verdict(result(started_at_s=104.0), half, ROLES, [killed]) is Verdict.LOST  # was served, and cut
    assert verdict(result("HTTP 500", started_at_s=113.1), half, ROLES, [killed]) is Verdict.LOST


def sample(router_id, at_s, mb=100.0, sockets=30, in_flight=0):
    return Sample(at_s=at_s, router_id=router_id, mb=mb, sockets=sockets, in_flight=in_flight, relay=True)


def seen(**changes):
    routers = ("router-0-10", "router-1-11")
    whole = Seen(
        seconds=600.0,
        quiet_s=200.0,
        results=[result(error="")] * 10,
        legs={"a": ON_1_AND_2},
        hits=[worker_hit(1)],
        samples=[sample(router, float(at)) for at in range(0, 601, 2) for router in routers],
        last=[sample(router, 620.0) for router in routers],
        idle_before={"router-0": 20, "router-1": 20},
        idle_after={"router-0": 36, "router-1": 20},
        retries=3,
        handed_on={},
        unasked={},
        busy_frac=0.5,
    )
    return msgspec.structs.replace(whole, **changes)


def missed(one):
    shown = figure(one, failures(one, ROLES), 2)
    return [measure.key for measure in shown.measures if measure.reached is False]


@pytest.mark.parametrize(
    ("changes", "violated"),
    [
        ({}, []),
        ({"results": [result()]}, []),
        ({"results": [result(), result(started_at_s=300.0)]}, ["lost"]),
        ({"results": [result(error="no end within 30 s")]}, ["hung"]),
        ({"hits": []}, ["hits"]),
        ({"unasked": {"router-0": 1}}, ["unasked"]),
        ({"handed_on": {"path": 1}}, ["handed_on"]),
        ({"last": [sample("router-0-10", 620.0)]}, ["relay"]),
        (
            {"last": [sample("router-0-10", 620.0), sample("router-1-11", 620.0, in_flight=1)]},
            ["in_flight"],
        ),
        ({"idle_after": {"router-0": 37, "router-1": 20}}, ["router-0_idle_sockets"]),
    ],
)
def test_whatever_went_wrong_is_a_goal_that_was_missed(changes, violated):
    """Exit status 1 says so."""
    assert missed(seen(**changes)) == violated


def test_growth_is_judged_where_routers_were_left_alone():
    """5 MB and 16 sockets over the quiet stretch; before it they come and go."""
    at_s = [float(at) for at in range(0, 601, 2)]
    quiet = [sample("router-0-10", at, mb=100 + max(at - 400, 0) / 25) for at in at_s]  # 8 MB in 200 s
    filling = [sample("router-1-11", at, mb=100 + min(at, 400)) for at in at_s]
    assert missed(seen(samples=quiet + filling)) == ["router-0_growth_mb"]
    leaking = [sample("router-0-10", at, sockets=30 + int(at / 10)) for at in at_s]  # 20 in 200 s
    assert missed(seen(samples=leaking + filling)) == ["router-0_growth_sockets"]
    assert missed(seen(samples=quiet, quiet_s=170.0)) == []


def test_a_routers_growth_is_judged_once_dynamo_has_swept_its_trees():
    """Five minutes of ever new prompts fill them, which is no leak; what comes after that is."""
    filling = [
        sample("router-0-10", float(at), mb=100 + min(at - 200, 300) / 10) for at in range(200, 801, 2)
    ]
    leaking = [sample("router-0-10", float(at), mb=100 + at / 10) for at in range(200, 801, 2)]
    assert missed(seen(samples=filling, seconds=800.0, quiet_s=600.0)) == []
    assert missed(seen(samples=leaking, seconds=800.0, quiet_s=600.0)) == ["router-0_growth_mb"]
    young = [one for one in leaking if one.at_s < 680.0]  # 170 s after the sweep
    assert missed(seen(samples=young, seconds=680.0, quiet_s=480.0)) == []


def test_a_failed_request_is_reported_with_the_processes_it_was_on():
    """To be looked into."""
    one = seen(results=[result(error=""), result()])
    [failure] = failures(one, ROLES)
    assert (failure.verdict, failure.error, failure.legs) == (
        Verdict.KILLED_WORKER,
        "stream cut",
        ON_1_AND_2,
    )
    assert "1 x was on a killed worker: stream cut" in figure(one, [failure], 2).conditions


def test_sockets_and_ports_are_those_of_the_process():
    """By which a worker's process is told from its records in discovery."""
    before = sockets(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        opened = sockets(os.getpid()) - before
        assert opened == {os.fstat(server.fileno()).st_ino}
        assert server.getsockname()[1] in listening_ports(os.getpid())
    assert not opened & sockets(os.getpid())


def test_what_cannot_be_soaked_is_said_before_anything_starts(capsys):
    """Status 2: key, value, bound."""
    with pytest.raises(SystemExit) as left:
        main(["--minutes", "0"])
    assert left.value.code == 2
    assert "--minutes 0: must be > 0 and <= 1440" in capsys.readouterr().err
