"""Cells on Dynamo's own simulator: what a policy does there, what is refused, what failing looks like."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_poa import dynamo_host
from dynamo_poa.bench.suites import replayed
from dynamo_poa.bench.suites.cells import Cell, Fleet, Phase, Policy, SlowWorker, Stall
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.arrivals import Closed, Poisson
from dynamo_poa.workloads.synthetic import MultiTurn, Paper

CELL = Cell(
    suite="test",
    engine="replay",
    fleet=Fleet(name="2P/3D", prefill=2, decode=3),
    content=Paper(input_tokens=512),
    load=Poisson(rate_rps=40),
    policy=Policy(name="kv"),
    seed=1,
    requests=300,
)


def cell(**changes: object) -> Cell:
    """Return CELL, changed."""
    return msgspec.structs.replace(CELL, **changes)


def test_every_request_is_counted_at_the_workers_that_served_it():
    """Disaggregated: each request has one worker of each pool; figures are complete and in seconds."""
    result = replayed.run(CELL)
    assert (result.state, result.reason) == ("done", "")
    assert (result.figures["requests"], result.figures["failed"]) == (300, 0)
    assert result.picks.keys() == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    assert sum(n for worker, n in result.picks.items() if worker.startswith("prefill")) == 300
    assert sum(n for worker, n in result.picks.items() if worker.startswith("decode")) == 300
    assert 0.01 < result.figures["ttft_p50_s"] < 0.2
    assert result.figures["ttft_mean_s"] < result.figures["e2e_mean_s"] < 2
    assert result.figures["throughput_rps"] == pytest.approx(40, rel=0.2)


def test_round_robin_takes_turns_and_aggregated_workers_have_their_own_name():
    """300 requests, 3 workers: 100 each."""
    policy = Policy(name="round-robin", router_mode="round-robin")
    result = replayed.run(cell(fleet=Fleet(name="3A", prefill=0, decode=3), policy=policy))
    assert result.picks == {"aggregated-0": 100, "aggregated-1": 100, "aggregated-2": 100}


def test_random_draws_without_regard_to_load_or_cache():
    """τ without end: with all requests of one template KV keeps to few workers where random does not."""
    fleet = Fleet(name="8A", prefill=0, decode=8)
    one = Paper(templates=1, input_tokens=4096, shared_frac=0.9)
    changes = {"fleet": fleet, "content": one, "load": Poisson(rate_rps=2), "requests": 400}
    random = replayed.run(cell(**changes, policy=Policy(name="random", router_mode="random")))
    kv = replayed.run(cell(**changes, policy=Policy(name="kv", overlap_credit=2.0)))
    assert min(random.picks.values()) > 20
    assert min(kv.picks.values()) < 20
    assert sum(random.picks.values()) == sum(kv.picks.values()) == 400


def test_a_closed_loop_never_has_more_requests_under_way_than_users():
    """Little's law: users = throughput x time in the system, to a few percent at the ends."""
    result = replayed.run(cell(load=Closed(users=16), requests=600))
    under_way = result.figures["throughput_rps"] * result.figures["e2e_mean_s"]
    assert under_way == pytest.approx(16, rel=0.1)
    assert under_way <= 16 * 1.001


def test_sessions_in_a_closed_loop_find_what_they_left():
    """A turn's prompt holds the turns before it: most of it is cached, which single prompts' are not."""
    turns = replayed.run(cell(content=MultiTurn(), load=Closed(users=8)))
    singles = replayed.run(cell(content=Paper(shared_frac=0.0), load=Closed(users=8)))
    assert turns.figures["cached_frac"] > 0.3
    assert singles.figures["cached_frac"] == 0


def test_a_faster_engine_is_faster_in_proportion():
    """`speedup` scales the simulated GPU's time: a lone request takes half as long at twice the speed."""
    lone = {"load": Poisson(rate_rps=0.01), "requests": 20}
    once = replayed.run(cell(**lone)).figures["e2e_mean_s"]
    twice = replayed.run(cell(**lone, fleet=msgspec.structs.replace(CELL.fleet, speedup=2.0)))
    assert twice.figures["e2e_mean_s"] == pytest.approx(once / 2, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"requests": 0}, "requests = 0: must be >= 1"),
        (
            {"phases": (Phase(name="a", load=Closed(users=1), seconds=1),)},
            "phases: the simulator keeps one load",
        ),
        ({"load": Closed(users=4, think_s=1.0)}, "load.think_s: simulated users ask again at once"),
        ({"policy": Policy(name="ours", plugin="active")}, "policy.plugin = 'active'"),
        (
            {"policy": Policy(name="p2", router_mode="power-of-two")},
            "policy.router_mode = 'power-of-two': the simulator offers kv, round-robin, random",
        ),
        (
            {
                "fleet": Fleet(
                    name="s", prefill=0, decode=2, slow=(SlowWorker(role="decode", number=0, factor=3),)
                )
            },
            "fleet.slow: all simulated workers are equally fast",
        ),
        (
            {
                "fleet": Fleet(
                    name="s",
                    prefill=0,
                    decode=2,
                    stall=Stall(role="decode", number=0, stall_s=2, period_s=6),
                )
            },
            "fleet.stall: simulated workers do not stall",
        ),
        ({"fleet": Fleet(name="r", prefill=0, decode=2, routers=2)}, "fleet.routers = 2"),
        ({"fleet": Fleet(name="1A", prefill=0, decode=1)}, "fleet = 1A: the simulator routes kv among two"),
    ],
)
def test_what_the_simulator_cannot_do_is_refused(changes: dict[str, object], problem: str):
    """Never approximated: a figure of something else would be taken for this one."""
    with pytest.raises(ConfigError) as caught:
        replayed.run(cell(**changes))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"cannot be replayed: {problem}")


def test_a_cell_without_an_answer_has_failed_and_says_why():
    """Prompts that fit no worker are refused by Dynamo; there are no figures of that, only the reason."""
    small = Fleet(name="2A", prefill=0, decode=2, kv_blocks=8)
    result = replayed.run(cell(fleet=small, load=Closed(users=3), requests=3))
    assert (result.state, result.figures) == ("failed", {})
    assert result.reason == "0 of 3 requests answered in 0 s"


def test_what_dynamo_says_is_the_reason():
    """A profile that is no npz: the cell has failed, the next one can run."""
    result = replayed.run(cell(fleet=msgspec.structs.replace(CELL.fleet, profile=__file__)))
    assert result.state == "failed"
    assert "NPZ" in result.reason


def test_cells_run_in_quiet_processes_of_their_own():
    """Two at once; DYN_LOG, which Dynamo reads when it is imported, is theirs alone."""
    before = os.environ.get("DYN_LOG")
    with replayed.pool() as pool:
        results = list(pool.map(replayed.run, [cell(seed=seed) for seed in (1, 2, 3)]))
    assert [result.state for result in results] == ["done"] * 3
    assert [result.cell.seed for result in results] == [1, 2, 3]
    assert os.environ.get("DYN_LOG") == before


def test_a_request_that_dynamo_forgets_is_no_smaller_sample(monkeypatch: pytest.MonkeyPatch):
    """Invariant: every request that was asked is in the figures; else the lost ones would flatter them."""
    replay = dynamo_host.replay_trace

    def forgets(source: Path, target: Path, **rest: Any) -> None:
        replay(source, target, **rest)
        target.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[1:]))

    monkeypatch.setattr(dynamo_host, "replay_trace", forgets)
    result = replayed.run(cell(requests=20))
    assert (result.state, result.figures) == ("failed", {})
    assert result.reason == "Dynamo told of 19 requests, not of all 20 that were asked"


@pytest.mark.parametrize(
    ("left", "why"),
    [(lambda data: data[:-9], "Input data was truncated"), (lambda _: b"{}\n", "Object missing required")],
)
def test_a_record_that_cannot_be_read_fails_its_cell_alone(
    monkeypatch: pytest.MonkeyPatch, left: Callable[[bytes], bytes], why: str
):
    """Cut short by a full disk, or by a Dynamo that writes other ones: the other cells go on."""
    replay = dynamo_host.replay_trace

    def cut(source: Path, target: Path, **rest: Any) -> None:
        replay(source, target, **rest)
        target.write_bytes(left(target.read_bytes()))

    monkeypatch.setattr(dynamo_host, "replay_trace", cut)
    result = replayed.run(cell(requests=20))
    assert (result.state, result.figures) == ("failed", {})
    assert result.reason.startswith(f"a record of Dynamo's cannot be read: {why}")


POOL = """
import os, sys
from dynamo_poa.bench.suites import replayed

def folder():
    return os.getpid(), str(replayed._folder())

if __name__ == "__main__":
    with replayed.pool(1) as pool:
        print(*pool.submit(folder).result(), flush=True)
        sys.stdin.read()
"""


INTERRUPTED = """
import os, signal, time
from dynamo_poa.bench.suites import replayed

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    with replayed.pool(1) as pool:
        job = pool.submit(os.getpid)
        time.sleep(0.3)
        os.killpg(0, signal.SIGINT)
        print(job.result() != os.getpid())
"""


def test_a_process_dies_with_its_parent_and_leaves_no_file(tmp_path: Path):
    """Found in review: whoever killed a run or a calibration left its processes waiting for ever."""
    (tmp_path / "run.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "run.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker, folder = parent.stdout.readline().split()
        there = Path(folder).is_dir()
        parent.kill()
    assert there
    for _ in range(200):
        if not _runs(int(worker)):
            break
        time.sleep(0.05)
    assert not _runs(int(worker))
    assert not Path(folder).exists()


def test_ctrl_c_while_processes_begin_is_nothing_to_them(tmp_path: Path):
    """Found in review: a terminal's Ctrl-C in the first second ended in their tracebacks."""
    (tmp_path / "run.py").write_text(INTERRUPTED)
    parent = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    assert (parent.returncode, parent.stdout, parent.stderr) == (0, "True\n", "")


def _runs(pid: int) -> bool:
    """Tell whether a process is there, and more than a body nobody has buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
