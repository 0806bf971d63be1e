"""`dynamo-poa bench`: a run's two steps, resuming, what is told; errors as a person sees them."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from suite_results import cell, done

from dynamo_poa.bench.suites.baselines import BEST, TUNING_SEEDS
from dynamo_poa.bench.suites.catalogue import seconds_of
from dynamo_poa.bench.suites.cells import Cell, Fleet, Policy, Result
from dynamo_poa.bench.suites.progress import Meter, duration, line
from dynamo_poa.bench.suites.runner import Block, Engines, failed
from dynamo_poa.bench.suites.session import Asked, run_suite
from dynamo_poa.bench.suites.store import NOT_RUN, StoreError, read
from dynamo_poa.clock import ManualClock

WINNER = "kv τ=0.3 ω=0.5"


@contextmanager
def threads(width: int) -> Iterator[Executor]:
    with ThreadPoolExecutor(width) as pool:
        yield pool


class Simulator:
    """Answers every cell; the winner is faster. Remembers what it was asked; `broken` seeds fail."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.asked: list[Cell] = []
        self.broken = broken

    def __call__(self, one: Cell) -> Result:
        self.asked.append(one)
        if one.seed in self.broken:
            return failed(one, "cannot")
        return done(one, ttft_mean_s=0.5 if one.policy.name == WINNER else 1.0)

    @asynccontextmanager
    async def block(
        self, fleet: Fleet, policies: tuple[Policy, ...], window_s: float
    ) -> AsyncIterator[Block]:
        yield self

    async def run(self, cell: Cell) -> Result:
        return self(cell)

    @property
    def engines(self) -> Engines:
        return Engines(pool=threads, replayed=self, block=self.block)


def asked(folder: Path, **changed: object) -> Asked:
    cells = tuple(
        msgspec.structs.replace(cell(policy.name, seed), policy=policy)
        for seed in (1, 2, 3)
        for policy in (Policy(name="kv"), BEST)
    )
    return msgspec.structs.replace(
        Asked(suite="test", cells=cells, folder=folder, seeds=(1, 2, 3)), **changed
    )


async def run(what: Asked, simulator: Simulator) -> tuple[bool, str]:
    out = StringIO()
    complete = await run_suite(what, simulator.engines, Console(file=out, width=200), ManualClock())
    return complete, out.getvalue()


async def test_the_best_setting_is_found_first_and_then_measured_on_other_seeds(tmp_path: Path) -> None:
    """The sweep's winner on tuning seeds is measured on others: no double dipping."""
    simulator = Simulator()
    complete, text = await run(asked(tmp_path), simulator)
    assert complete
    assert {one.seed for one in simulator.asked[:24]} == set(TUNING_SEEDS)
    assert {one.seed for one in simulator.asked[24:]} == {1, 2, 3}
    best = {
        one.cell.policy for one in read(tmp_path / "test.jsonl").results if one.cell.policy.name == "kv best"
    }
    assert best == {Policy(name="kv best", router_temperature=0.3, overlap_credit=0.5)}
    assert text.splitlines()[-1] == f"test: 6 done; {tmp_path / 'test.jsonl'}"
    assert f"test-tuning: 24 done; {tmp_path / 'test-tuning.jsonl'}" in text


async def test_the_same_command_runs_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    """Done cells stay, the setting that was chosen too."""
    first = Simulator(broken=frozenset({2}))
    complete, text = await run(asked(tmp_path), first)
    assert not complete
    assert text.splitlines()[-1].startswith("test: 4 done, 2 failed")
    second = Simulator()
    complete, text = await run(asked(tmp_path), second)
    assert complete
    assert {(one.seed, one.policy.name) for one in second.asked} == {(2, "kv"), (2, "kv best")}
    assert "test: 4 of 6 cells are done already" in text
    third = Simulator()
    complete, text = await run(asked(tmp_path), third)
    assert (complete, third.asked) == (True, [])
    assert text.splitlines()[-1].startswith("test: nothing left to do")


async def test_where_no_best_setting_was_found_its_cells_fail_and_the_others_are_run(tmp_path: Path) -> None:
    """The reason names the file that has the failed cells of the search."""
    complete, _ = await run(asked(tmp_path), Simulator(broken=frozenset({TUNING_SEEDS[0]})))
    assert not complete
    ended = {(one.cell.policy.name, one.state, one.reason) for one in read(tmp_path / "test.jsonl").results}
    reason = "not run: no best setting was found, see the failed cells of test-tuning.jsonl"
    assert ended == {("kv", "done", ""), ("kv best", "failed", reason)}


async def test_a_void_cell_is_no_failure_but_is_run_again(tmp_path: Path) -> None:
    """The machine was too busy; it may not be the next time."""

    class Busy(Simulator):
        def __call__(self, one: Cell) -> Result:
            result = super().__call__(one)
            return msgspec.structs.replace(result, state="void", reason="busy") if one.seed == 3 else result

    complete, text = await run(asked(tmp_path), Busy())
    assert complete
    assert text.splitlines()[-1].startswith("test: 4 done, 2 void")
    again = Simulator()
    await run(asked(tmp_path), again)
    assert {one.seed for one in again.asked} == {3}


async def test_a_full_disk_keeps_what_was_finished_and_the_rest_stands_there_as_not_run(
    tmp_path: Path,
) -> None:
    """Issue: a full disk (finished cells kept, the rest marked)."""
    what = asked(tmp_path, cells=tuple(cell("kv", seed, engine="live", seconds=9.0) for seed in range(1, 9)))

    class Fills(Simulator):
        """Lets files grow no further once three cells are done."""

        def __call__(self, one: Cell) -> Result:
            if len(self.asked) == 3:
                size = (tmp_path / "test.jsonl").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
            return super().__call__(one)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            await run(what, Fills())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    ended = {one.cell.seed: (one.state, one.reason) for one in read(tmp_path / "test.jsonl").results}
    assert ended == {
        **dict.fromkeys((1, 2, 3), ("done", "")),
        **dict.fromkeys((4, 5, 6, 7, 8), ("failed", NOT_RUN)),
    }


def test_the_time_left_follows_what_the_cells_really_took() -> None:
    """Estimated 0.1 s for both cells; half done after 4 s: 4 s left."""
    clock = ManualClock()
    cells = [cell(seed=1), cell(seed=2)]
    meter = Meter(cells, clock)
    assert meter.left_s == pytest.approx(2 * seconds_of(cells[0]))
    clock._monotonic_s += 4.0
    meter.count(done(cells[0]))
    assert (meter.finished, meter.finished_frac, meter.left_s) == (1, 0.5, pytest.approx(4.0))
    meter.count(failed(cells[1], "x"))
    assert (meter.finished_frac, meter.left_s) == (1.0, 0.0)
    assert meter.states == {"done": 1, "failed": 1}


def test_a_cell_is_told_in_one_line_whatever_came_of_it() -> None:
    """Workload, policy, seed; figures or the reason."""
    what = "replay, 2P/4D | paper | 8 users, kv, seed 1: "
    assert line(done(cell(), ttft_mean_s=0.12345, other=1.0)) == what + "ttft_mean_s 0.123"
    assert line(failed(cell(), "one\ntwo")) == what + "FAILED: one; two"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5400.0, "90 min"), (7500.0, "2 h 05 min")],
)
def test_a_duration_is_told_in_the_unit_it_deserves(seconds: float, text: str) -> None:
    """For `bench list` and the bar."""
    assert duration(seconds) == text


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run `dynamo-poa` in a process of its own."""
    code = "from dynamo_poa.serve.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_person_gets_a_line_and_status_2_for_what_there_is_not(tmp_path: Path) -> None:
    """Issue, bad input: an unknown suite or baseline (the list); nothing is written."""
    out, bad = tmp_path / "out", tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    one = tmp_path / "one.jsonl"
    one.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n')
    for words, said in (
        (("nope", "--out", str(out)), "error: suite 'nope': must be one of paper-1, paper-2, paper-3"),
        (
            ("smoke", "--out", str(out), "--only", "fastest"),
            "error: --only 'fastest': must be one of this suite's",
        ),
        (("smoke", "--out", str(out), "--seeds", "0"), "error: --seeds = 0: must be in [1, 100]"),
        (
            ("workloads", "--out", str(out), "--trace", str(bad)),
            f"error: trace {bad}: 1 of 1 lines are bad (100.00%): must be <= 1%",
        ),
        (
            ("workloads", "--out", str(out), "--trace", str(one)),
            f"error: --trace {one}: holds 1 request: must hold 2, one in each half",
        ),
        (
            ("smoke", "--out", str(out), "--trace", str(bad)),
            f"error: --trace {bad}: suite 'smoke' replays none: must be of workloads",
        ),
        (("smoke", "--out", str(bad), "--only", "6A,kv"), f"error: --out {bad}: cannot be written to: File"),
    ):
        ended = command("bench", "run", *words)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith(said)
    assert not out.exists()
    ended = command("bench", "report", str(out))
    assert (ended.returncode, ended.stderr.startswith(f"error: {out}: must be a folder with files")) == (
        2,
        True,
    )


def test_a_full_disk_under_what_is_told_is_one_line_and_status_1(tmp_path: Path) -> None:
    """Found in review: `bench run ... > log` ended in a traceback. The figures are on another disk."""
    code = "from dynamo_poa.serve.cli import main; main()"
    words = ("bench", "run", "smoke", "--seeds", "1", "--out", str(tmp_path), "--only", "6A,round-robin")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: [Errno 28] No space left on device; what was finished is kept, the same command goes on from "
        "there\n"
    )
    assert [one.state for one in read(tmp_path / "smoke.jsonl").results].count("done") >= 1


def test_the_list_has_every_suite_with_engine_cells_and_time() -> None:
    """Issue: `bench list`."""
    ended = command("bench", "list", "--seeds", "1")
    assert ended.returncode == 0
    (row,) = [row.split() for row in ended.stdout.splitlines() if row.startswith("paper-4 ")]
    assert row[:5] == ["paper-4", "replay", "80", "+", "96"]
    assert (
        "policies: live round-robin, random, power-of-two, least-loaded, kv, kv decay, kv best"
        in ended.stdout
    )


def test_where_greek_cannot_be_written_the_rest_is() -> None:
    """Found in review: `bench list` ended in a traceback on a Latin-1 terminal, and a run would have."""
    ended = subprocess.run(
        [sys.executable, "-c", "from dynamo_poa.serve.cli import main; main()", "bench", "list"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"16 settings of ? and ? below" in ended.stdout


def test_a_suite_is_run_interrupted_gone_on_with_and_reported(tmp_path: Path) -> None:
    """The real simulator: Ctrl-C ends with 130 and keeps cells; the rest is run later; a page is written."""
    words = ("bench", "run", "smoke", "--out", str(tmp_path), "--only", "2P/4D,32 users")
    code = "from dynamo_poa.serve.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        for told in running.stdout:
            if told.startswith("smoke-tuning 5/24"):
                break
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does it: the simulator's processes get it too
        rest = running.stdout.read()
        assert running.wait(timeout=60) == 130
    assert rest.endswith("interrupted: what was finished is kept; the same command goes on from there\n")
    finished = [one for one in read(tmp_path / "smoke-tuning.jsonl").results if one.state == "done"]
    assert len(finished) >= 5
    ended = command(*words)
    assert ended.returncode == 0, ended.stderr
    assert f"smoke-tuning: {len(finished)} of 24 cells are done already" in ended.stdout
    results = read(tmp_path / "smoke.jsonl").results
    assert {one.cell.policy.name for one in results} == {"round-robin", "random", "kv", "kv decay", "kv best"}
    assert {one.state for one in results} == {"done"}
    assert len(results) == 15
    ended = command("bench", "report", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path}/smoke.html, {tmp_path}/smoke.md\n")
    assert "<svg" in (tmp_path / "smoke.html").read_text()
    assert (tmp_path / "smoke.md").read_text().startswith("# Bench: smoke\n")
