"""The file of a suite's results: whole lines, what survives what, what may be gone on with."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from suite_results import cell, done, stamp

from dynamo_poa.bench.suites.cells import NotANumber, Point, Result, Stamp
from dynamo_poa.bench.suites.store import NOT_RUN, Store, StoreError, read, read_all
from dynamo_poa.errors import ConfigError


def filled(folder: Path, *results: Result, of: Stamp | None = None) -> Path:
    """Write a file of results and return its path."""
    with Store.open(folder, of or stamp(), ()) as store:
        for result in results:
            store.add(result)
    return store.path


@contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Let no file of this process grow past so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_opens_with_its_stamp_and_gives_back_what_was_added(tmp_path: Path) -> None:
    """Issue: every result file opens with a build stamp."""
    results = (done(cell(seed=1), ttft_mean_s=0.5), done(cell(seed=2), ttft_mean_s=0.25))
    path = filled(tmp_path / "new" / "folder", *results)
    assert path == tmp_path / "new" / "folder" / "test.jsonl"
    assert msgspec.json.decode(path.read_bytes().splitlines()[0], type=Stamp) == stamp()
    contents = read(path)
    assert (contents.stamp, contents.results, contents.problems) == (stamp(), results, ())


def test_a_file_is_gone_on_with_and_keeps_when_it_was_begun(tmp_path: Path) -> None:
    """A resumed run asks for more seeds: the stamp says so, the results of before are there."""
    first, second = done(cell(seed=1), x=1.0), done(cell(seed=2), x=2.0)
    filled(tmp_path, first)
    later = stamp(seeds=(1, 2, 3, 4), started_at="2026-01-02T00:00:00Z")
    with Store.open(tmp_path, later, ()) as store:
        assert store.contents.results == (first,)
        store.add(second)
    contents = read(store.path)
    assert contents.results == (first, second)
    assert contents.stamp == stamp(seeds=(1, 2, 3, 4))


def test_only_done_cells_need_no_other_run_and_the_last_result_of_a_cell_counts(tmp_path: Path) -> None:
    """A failed or void cell is tried again when the run is resumed."""
    void = Result(cell=cell(seed=1), state="void", reason="busy")
    failed = Result(cell=cell(seed=2), state="failed", reason="dead")
    good = done(cell(seed=2), x=1.0)
    contents = read(filled(tmp_path, void, failed, good))
    assert contents.results == (void, good)
    assert contents.done == {good.cell.id: good}


def test_cells_are_marked_as_not_run_until_their_result_comes(tmp_path: Path) -> None:
    """Issue: finished cells kept, the rest marked: also after a kill, which leaves no time for it."""
    first, second = done(cell(seed=1), x=1.0), Result(cell=cell(seed=2), state="failed", reason="dead")
    cells = [cell(seed=seed) for seed in (1, 2, 3)]
    with Store.open(tmp_path, stamp(), cells) as store:
        assert store.contents.results == ()
        store.add(first)
        store.add(second)
    marked = {result.cell.seed: (result.state, result.reason) for result in read(store.path).results}
    assert marked == {1: ("done", ""), 2: ("failed", "dead"), 3: ("failed", NOT_RUN)}
    with Store.open(tmp_path, stamp(), cells):
        pass
    assert {result.cell.seed: (result.state, result.reason) for result in read(store.path).results} == marked


def test_of_cells_that_are_no_longer_asked_for_those_that_are_done_stay(tmp_path: Path) -> None:
    """A mark or a failure of such a cell says nothing that somebody wants to know."""
    first, second = done(cell(seed=1), x=1.0), Result(cell=cell(seed=2), state="failed", reason="dead")
    with Store.open(tmp_path, stamp(), [cell(seed=seed) for seed in (1, 2, 3)]) as store:
        store.add(first)
        store.add(second)
    with Store.open(tmp_path, stamp(), [cell(seed=4)]) as store:
        assert store.contents.results == (first,)
    assert [(one.cell.seed, one.state) for one in read(store.path).results] == [(1, "done"), (4, "failed")]


def test_results_of_another_build_or_machine_are_never_mixed(tmp_path: Path) -> None:
    """The message names what changed, both values, and what to do; the file stays as it was."""
    path = filled(tmp_path, done(cell(), x=1.0))
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path, stamp(commit="def"), ())
    assert caught.value.problems == (
        f"{path}: commit was 'abc' and is 'def': choose another --out, or --fresh to set its results aside",
    )
    assert path.read_bytes() == before


def test_beginning_anew_sets_the_old_results_aside(tmp_path: Path) -> None:
    """Nothing is deleted, and what was set aside is not read with the rest."""
    old = filled(tmp_path, done(cell(), x=1.0)).read_bytes()
    for number in (1, 2):
        with Store.open(tmp_path, stamp(commit="def"), (), fresh=True) as store:
            assert store.contents.results == ()
        assert (tmp_path / f"test.jsonl.{number}").exists()
    assert (tmp_path / "test.jsonl.1").read_bytes() == old
    (contents,) = read_all(tmp_path)
    assert contents.stamp == stamp(commit="def")


def test_a_line_cut_short_costs_its_own_cell_alone(tmp_path: Path) -> None:
    """A kill in the middle of a write: the line is named, the others are read, the next run drops it."""
    good = done(cell(seed=1), x=1.0)
    path = filled(tmp_path, good, done(cell(seed=2), x=2.0))
    path.write_bytes(path.read_bytes()[:-20])
    contents = read(path)
    assert contents.results == (good,)
    (problem,) = contents.problems
    assert problem.startswith(f"{path}, line 3: no result: ")
    with Store.open(tmp_path, stamp(), ()) as store:
        assert store.contents.problems == contents.problems
    assert read(path).problems == ()


@pytest.mark.parametrize("line", [b'{"cell": 1}', b"null", b"\xff\xfe", b'{"state":"done"'])
def test_what_is_no_result_is_named_wherever_it_stands(tmp_path: Path, line: bytes) -> None:
    """Bad lines between good ones."""
    path = filled(tmp_path, done(cell(seed=1), x=1.0))
    path.write_bytes(
        path.read_bytes() + line + b"\n" + msgspec.json.encode(done(cell(seed=2), x=2.0)) + b"\n"
    )
    contents = read(path)
    assert [result.cell.seed for result in contents.results] == [1, 2]
    assert len(contents.problems) == 1
    assert f"{path}, line 3" in contents.problems[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_result_that_is_no_number_cannot_exist(value: float) -> None:
    """Issue: NaN anywhere in a result is an error, not a number."""
    with pytest.raises(NotANumber, match=r"figures\.ttft_mean_s = .*: must be finite"):
        done(cell(), ttft_mean_s=value)
    with pytest.raises(NotANumber, match=r"series\[1\]\.poa_hat = .*: must be finite"):
        Result(cell=cell(), state="done", series=(Point(at_s=0.0), Point(at_s=1.0, poa_hat=value)))
    with pytest.raises(NotANumber, match=r"wall_s = .*: must be finite"):
        Result(cell=cell(), state="done", wall_s=value)


@pytest.mark.parametrize("text", ["null", "NaN", "1e999"])
def test_a_file_that_holds_no_number_is_read_without_that_line(tmp_path: Path, text: str) -> None:
    """However it got there: JSON has no NaN, and 1e999 is infinite."""
    path = filled(tmp_path, done(cell(), ttft_mean_s=12345.5))
    path.write_bytes(path.read_bytes().replace(b"12345.5", text.encode()))
    contents = read(path)
    assert (contents.results, len(contents.problems)) == ((), 1)


def test_a_full_disk_keeps_what_is_finished_and_leaves_no_half_line(tmp_path: Path) -> None:
    """Issue: full disk. A later, shorter result that fits is still taken."""
    first, long, short = (
        done(cell(seed=1), x=1.0),
        Result(cell=cell(seed=2), state="failed", reason="x" * 5000),
        done(cell(seed=3), x=3.0),
    )
    with Store.open(tmp_path, stamp(), ()) as store:
        store.add(first)
        size = store.path.stat().st_size
        with full_disk(size + 2000):
            with pytest.raises(StoreError, match=r"test\.jsonl: cannot be written"):
                store.add(long)
            assert store.path.stat().st_size == size
            store.add(short)
    assert read(store.path).results == (first, short)


def test_a_disk_that_is_full_from_the_start_leaves_the_old_file(tmp_path: Path) -> None:
    """The stamp is replaced in one step or not at all."""
    path = filled(tmp_path, done(cell(), x=1.0))
    before = path.read_bytes()
    with full_disk(10), pytest.raises(StoreError, match="File too large"):
        Store.open(tmp_path, stamp(seeds=(1,)), ())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["test.jsonl"]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """No full disk: the option is wrong, and stays so."""
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "x", "Not a directory")):
        with pytest.raises(ConfigError, match=f"--out {folder}: cannot be written to: {why}"):
            Store.open(folder, stamp(), ())


def test_another_suites_file_is_neither_gone_on_with_nor_read(tmp_path: Path) -> None:
    """Its cells would count as this suite's, and its report take the other one's place."""
    path = filled(tmp_path, done(cell(), x=1.0))
    renamed = path.rename(tmp_path / "other.jsonl")
    said = r"other\.jsonl: its stamp says suite 'test': must be the file's name"
    with pytest.raises(ConfigError, match=said):
        Store.open(tmp_path, stamp("other"), ())
    with pytest.raises(ConfigError, match=said):
        read_all(tmp_path)
    assert read(renamed.rename(path)).results == (done(cell(), x=1.0),)


def test_two_runs_never_write_to_one_folder_at_once(tmp_path: Path) -> None:
    """The second is refused, and let in when the first has ended, also after one that was refused."""
    with (
        Store.open(tmp_path, stamp(), [cell()]) as store,
        pytest.raises(ConfigError, match="another run writes there: choose another --out"),
    ):
        Store.open(tmp_path, stamp("other"), [cell()])
    assert len(read(store.path).results) == 1
    with pytest.raises(ConfigError, match="commit was 'abc' and is 'def'"):
        Store.open(tmp_path, stamp(commit="def"), ())
    Store.open(tmp_path, stamp(), ()).close()


def test_a_folder_without_results_and_a_file_without_a_stamp_are_refused(tmp_path: Path) -> None:
    """The path and what is expected are named."""
    with pytest.raises(ConfigError, match=r"must be a folder with files of results \(\*\.jsonl\)"):
        read_all(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"other\.jsonl, line 1: no stamp of a build"):
        read_all(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read(tmp_path / "missing.jsonl")
