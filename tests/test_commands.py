"""Commands without a server: which graph is meant, what is refused unsent, what is shown."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from dynamo_messages import FIXTURES
from records import RECORD
from shown import text
from typer.testing import CliRunner

from dynamo_poa.clock import ManualClock
from dynamo_poa.control import MAX_PIN_S
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve import commands
from dynamo_poa.serve.record import recorded_subjects
from dynamo_poa.serve.rundir import RunningGraph
from dynamo_poa.serve.show import MAX_DURATION_S, read_duration_s
from dynamo_poa.serve.target import Target, find_target
from dynamo_poa.serve.view import changes, record_view
from dynamo_poa.serve.watch import Feed, live_view, trouble
from dynamo_poa.telemetry import PolicyView
from dynamo_poa.values import Mode, ParamsKind, Regime, Selection, Setting

RECORDING = FIXTURES / "poa_2p4d_straggler.ndjson.gz"
TARGET = Target("nats://127.0.0.1:4222", "poa")


# Which graph is meant


@pytest.fixture
def run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which graphs of this user are looked for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "dynamo-poa"


def announce(run_dirs: Path, namespace: str, port: int, pid: int | None = None) -> None:
    folder = run_dirs / f"{namespace}-{port}"
    folder.mkdir(parents=True)
    graph = RunningGraph(
        namespace=namespace,
        target="graphs.disagg_poa:Frontend",
        pid=pid or os.getpid(),
        nats_url=f"nats://127.0.0.1:{port}",
        http_url="http://127.0.0.1:8000",
        metrics_urls={},
    )
    (folder / "state.json").write_bytes(msgspec.json.encode(graph))


def test_the_one_running_graph_is_taken(run_dirs: Path) -> None:
    """No option is needed where there is nothing to choose."""
    announce(run_dirs, "alpha", 4001)
    assert find_target(None, None)[:2] == ("nats://127.0.0.1:4001", "alpha")


def test_a_namespace_names_one_of_several(run_dirs: Path) -> None:
    """--namespace alone is enough for a graph of this user."""
    announce(run_dirs, "alpha", 4001)
    announce(run_dirs, "beta", 4002)
    assert find_target(None, "beta")[:2] == ("nats://127.0.0.1:4002", "beta")


def test_a_server_names_the_graph_that_uses_it(run_dirs: Path) -> None:
    """--nats alone: the namespace is the running graph's, `poa` where none is known."""
    announce(run_dirs, "alpha", 4001)
    announce(run_dirs, "beta", 4002)
    assert find_target("nats://127.0.0.1:4002", None)[:2] == ("nats://127.0.0.1:4002", "beta")
    assert find_target("nats://elsewhere:4222", None) == Target("nats://elsewhere:4222", "poa")


def test_both_options_are_taken_as_they_are(run_dirs: Path) -> None:
    """A graph of somebody else's, about which no file says anything."""
    announce(run_dirs, "alpha", 4001)
    assert find_target("nats://elsewhere:4222", "gamma") == Target("nats://elsewhere:4222", "gamma")


def test_what_is_known_of_a_graph_is_told_and_its_password_is_not(run_dirs: Path) -> None:
    """First line of status, set and release: who runs several sees which one it was."""
    announce(run_dirs, "alpha", 4001)
    known = f"namespace alpha at nats://127.0.0.1:4001, http://127.0.0.1:8000, pid {os.getpid()}"
    assert find_target(None, None).told("nats://127.0.0.1:4001") == known
    assert find_target("nats://127.0.0.1:4001", "alpha").told("nats://127.0.0.1:4001") == known
    foreign = find_target("nats://me:secret@elsewhere:4222", "gamma")
    assert foreign.told("nats://elsewhere:4222") == "namespace gamma at nats://elsewhere:4222"


def test_several_graphs_are_an_error_that_lists_them(run_dirs: Path) -> None:
    """Never a guess."""
    announce(run_dirs, "alpha", 4001)
    announce(run_dirs, "beta", 4002)
    with pytest.raises(ConfigError) as caught:
        find_target(None, None)
    first, *listed = caught.value.problems
    assert first == "several graphs are running: name one with --namespace or --nats"
    where = f"(graphs.disagg_poa:Frontend at http://127.0.0.1:8000, pid {os.getpid()})"
    assert sorted(listed) == [
        f"  --namespace alpha --nats nats://127.0.0.1:4001  {where}",
        f"  --namespace beta --nats nats://127.0.0.1:4002  {where}",
    ]


@pytest.mark.parametrize(("namespace", "under"), [(None, ""), ("gamma", " in namespace gamma")])
def test_no_graph_is_an_error_that_says_how_to_name_one(
    run_dirs: Path, namespace: str | None, under: str
) -> None:
    """A graph whose supervisor is dead does not count."""
    announce(run_dirs, "alpha", 4001, pid=2**22 + 1)  # above the highest pid there is
    with pytest.raises(ConfigError) as caught:
        find_target(None, namespace)
    expected = f"no graph of this user is running{under}: name one with --nats URL --namespace NAME"
    assert caught.value.problems == (expected,)


@pytest.mark.parametrize("namespace", ["a.b", "*", ">", "", "a b"])
def test_a_namespace_that_is_no_token_is_refused(run_dirs: Path, namespace: str) -> None:
    """A wildcard would reach the controllers of others."""
    with pytest.raises(ConfigError, match=r"must be letters, digits, - and _"):
        find_target("nats://elsewhere:4222", namespace)


# What is refused before it is sent


@pytest.mark.parametrize(
    ("written", "duration_s"), [("500ms", 0.5), ("60s", 60.0), ("1.5m", 90.0), ("720h", 2_592_000.0)]
)
def test_a_duration_is_read_with_its_unit(written: str, duration_s: float) -> None:
    """Contract of --for; the longest is the longest pin the controller takes."""
    assert read_duration_s("--for", written) == duration_s
    assert MAX_DURATION_S == MAX_PIN_S


@pytest.mark.parametrize("written", ["60", "s", "0s", "-1s", "1d", "721h", "1e3s", "nan", "١s", "60 s", ""])
def test_a_bad_duration_is_refused_by_name_value_and_bound(written: str) -> None:
    """A bare number would be a guess at its unit."""
    with pytest.raises(ConfigError) as caught:
        read_duration_s("--for", written)
    bound = "a number with ms, s, m or h, such as 60s, > 0 and <= 720h"
    assert caught.value.problems == (f"--for = {written!r}: must be {bound}",)


def run_command(*arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    commands.register(app)
    return CliRunner().invoke(app, arguments)


def test_every_summary_fits_its_line() -> None:
    """`--help` cuts off what does not fit in 80 columns."""
    shown = run_command("--help").output
    assert "  set       Pin the router's parameters, both together.\n" in shown
    commands_shown = shown.partition("Commands:\n")[2].splitlines()
    assert [line for line in commands_shown if "..." in line] == []


def test_set_names_every_bad_value_at_once_and_sends_nothing(run_dirs: Path) -> None:
    """The messages are RouterParams' own; no graph is even looked for."""
    result = run_command("set", "--router-temperature", "nan", "--overlap-weight", "2.5", "--for", "60")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.problems == (
        "router_temperature = nan: must be a finite number in [0, 100]",
        "overlap_weight = 2.5: must be a finite number in [0, 2]",
        "--for = '60': must be a number with ms, s, m or h, such as 60s, > 0 and <= 720h",
    )


def test_watch_without_a_terminal_says_what_to_use(run_dirs: Path) -> None:
    """A live display in a pipe is of no use to anybody."""
    announce(run_dirs, "alpha", 4001)
    result = run_command("watch")
    assert str(result.exception) == "standard output is no terminal: use watch --json, or status"


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--window", "8"), "PoaController.window = 8: must be in [16, 4096]"),
        (("--block-size", "0"), "Common.block_size = 0: must be in [1, 4096]"),
    ],
)
def test_estimate_keeps_to_the_bounds_of_the_configuration(option: tuple[str, str], problem: str) -> None:
    """The same knob has the same range, live and replayed."""
    assert str(run_command("estimate", "recording", *option).exception) == problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--at", "soon"), "--at = 'soon': must be a number of seconds >= 0, such as 12.5"),
        (("--at", "-1"), "--at = '-1': must be a number of seconds >= 0, such as 12.5"),
        (("--at", "nan"), "--at = 'nan': must be a number of seconds >= 0, such as 12.5"),
        (("--at", "1m"), "--at = '1m': must be a number of seconds >= 0, such as 12.5"),
        (("--at", "1", "--block-size", "0"), "Common.block_size = 0: must be in [1, 4096]"),
        (
            ("--at", "99s"),
            f"--at = 99: must be in [0, 18.136], seconds since the first message of {RECORDING}",
        ),
    ],
)
def test_explain_refuses_an_instant_that_is_none(options: tuple[str, ...], problem: str) -> None:
    """Key, value and bound."""
    assert str(run_command("explain", str(RECORDING), *options).exception) == problem


@pytest.mark.parametrize("at", ["12", "12s", "12.5", "12.999s"])
def test_explain_tells_which_snapshot_it_is_about(at: str) -> None:
    """The nearest at or before the instant; seconds with or without their unit."""
    answer = json.loads(run_command("explain", str(RECORDING), "--at", at, "--json").output)
    assert (answer["at_s"], answer["asked_s"]) == (12.0, float(at.rstrip("s")))


def test_a_recording_holds_workers_decisions_parameters_and_telemetry() -> None:
    """Dynamo's event plane lives in the workers' namespace and, of exposed workers, in the graph's."""
    assert recorded_subjects("alpha") == [
        "namespace.alpha-workers.component.*.endpoint.*.*",
        "namespace.alpha.component.*.endpoint.*.*",
        "poa.alpha.decisions",
        "poa.alpha.params",
        "poa.alpha.cards",
        "poa.alpha.telemetry",
    ]


# What is shown


def test_a_record_is_shown_with_every_figure_and_every_unknown() -> None:
    """Unknown is `-` or a reason, never 0."""
    shown = text(record_view(RECORD)).splitlines()
    assert shown[0].startswith("graph       poa, mode active, tick 7 at ")
    assert shown[1:12] == [
        "regime      transition  TTFT P99 2.000 s at or over θ1 1.000 s",
        "PoA-hat     1.500 (1.250 to 1.750) from 64 snapshots (prefill 1.750); the paper's: 1.125",
        "excess      miss 12.5%, congestion 37.5%, capacity 50.0%",
        "caching     PoA-hat none: not priced yet",
        "split       PoA-hat none: not priced yet",
        "stragglers  decode 14370722098883561847 5.0x slower than its pool",
        "TTFT        P50 -, P99 -, its average - (0 samples, none)",
        "against     baseline -, θ1 -, θ2 -",
        "parameters  τ 0.7 ω 1, revision 3, policy, applied",
        "policy      table: τ 0.7 ω 1, table",
        "load        - in flight, - arrivals/s, 0.0% refused",
    ]
    assert [line.split() for line in shown[13:15]] == [
        ["pool", "regime", "workers", "silent", "KV", "used", "fullest", "queued", "running", "busy"],
        ["prefill", "-", "2", "0", "25.0%", "-", "-", "-", "-"],
    ]
    assert shown[17].split() == ["r1", "3", "heartbeat", "none", "0", "0.100", "s"]
    assert shown[19:] == [
        "messages    kv-events 10; -/s, the last - ago",
        "dropped     schema 1",
        "legs ended  none",
        "controller  0 regime changes, 2 swaps, tick 0.0 ms, 0 failed, NATS connected",
    ]


def test_a_record_without_estimate_says_why_and_a_pin_how_long() -> None:
    """PoA-hat is absent with a reason, never 1.0."""
    record = msgspec.structs.replace(
        RECORD,
        poa_hat=None,
        poa_reason="prefill: 3 decisions with candidates, 8 needed",
        kind=ParamsKind.PIN,
        pin_left_s=42.4,
        wanted_router_temperature=0.8,
        wanted_overlap_weight=0.1,
        dwell_left_s=3.25,
        pools={},
        routers=(),
    )
    shown = text(record_view(record))
    assert "PoA-hat     none: prefill: 3 decisions with candidates, 8 needed; the paper's" in shown
    wish = "the policy would set τ 0.8 ω 0.1"
    assert f"τ 0.7 ω 1, revision 3, pin for another 42 s, applied; {wish}\n" in shown
    assert "θ1 1.000 s (next change in 3.2 s at the earliest)\n" in shown
    assert "no worker known\n\nno router heard\n" in shown


def test_only_what_changed_between_two_records_is_a_line() -> None:
    """Regime, parameters and whose they are, mode; nothing for the first record or an equal one."""
    now = msgspec.structs.replace(
        RECORD,
        regime=Regime.SATURATED,
        reason="P99 over θ2",
        router_temperature=0.8,
        overlap_weight=0.1,
        revision=4,
        mode=Mode.SHADOW,
    )
    assert list(changes(None, now)) == []
    assert list(changes(RECORD, msgspec.structs.replace(RECORD, tick=8, poa_hat=2.0))) == []
    assert [line[10:] for line in changes(RECORD, now)] == [
        "mode active -> shadow",
        "transition -> saturated: P99 over θ2",
        "τ 0.7 ω 1 policy -> τ 0.8 ω 0.1 policy, revision 4",
    ]


def test_policies_are_shown_with_their_wish_reason_gain_and_failure() -> None:
    """What is in force, what the policy wants in its place, what the one in shadow would do."""
    policy = PolicyView(name="auto", setting=Setting(0.3, 1.0), reason="trial", detail="pair 2 of 8")
    shadow = PolicyView(
        name="marginal",
        setting=Setting(0.0, 1.0, 4.0, Selection.MARGINAL),
        reason="policy_failed",
        predicted_gain_frac=0.125,
        disabled_left_s=41.6,
        errors=3,
    )
    record = msgspec.structs.replace(
        RECORD, policy=policy, shadow=shadow, selection=Selection.MARGINAL, prefill_load_scale=2.0
    )
    shown = text(record_view(record)).splitlines()
    assert shown[9:12] == [
        "parameters  τ 0.7 ω 1 scale 2 marginal, revision 3, policy, applied; the policy would set τ 0.7 ω 1",
        "policy      auto: τ 0.3 ω 1, trial (pair 2 of 8)",
        "shadow      marginal: τ 0 ω 1 scale 4 marginal, policy_failed, predicted to save 12.5%, "
        "asked again in 42 s, failed 3 times",
    ]
    before = msgspec.structs.replace(
        record, policy=msgspec.structs.replace(policy, reason="no_candidate_better"), selection=Selection.KV
    )
    assert [line[10:] for line in changes(before, record)] == [
        "policy auto: no_candidate_better -> trial (pair 2 of 8)",
        "τ 0.7 ω 1 scale 2 policy -> τ 0.7 ω 1 scale 2 marginal policy, revision 3",
    ]


async def test_a_silent_controller_is_told_apart_from_a_quiet_graph() -> None:
    """The last record stays, with how long nothing has come; bytes that are no record do not count."""
    clock = ManualClock()
    feed = Feed(clock)
    await clock.advance(2.0)
    assert trouble(feed, TARGET, is_connected=True) == "no telemetry in namespace poa for 2 s"
    feed.take("poa.poa.telemetry", msgspec.msgpack.encode(RECORD))
    assert trouble(feed, TARGET, is_connected=True) == ""
    assert text(live_view(feed, TARGET, is_connected=True)).endswith(
        "last changes\nnone since the start of this view"
    )
    feed.take("poa.poa.telemetry", b"\x80")
    await clock.advance(4.0)
    wrong = "no telemetry in namespace poa for 4 s, 1 unreadable records"
    assert text(live_view(feed, TARGET, is_connected=True)).splitlines()[0] == wrong
    assert trouble(feed, TARGET, is_connected=False) == "NATS is away, connecting again, 1 unreadable records"


async def test_a_backlog_drops_the_oldest_and_counts_them() -> None:
    """Queues are bounded and say what they drop."""
    feed = Feed(ManualClock(), backlog=2)
    for tick in (1, 2, 3):
        feed.take("", msgspec.msgpack.encode(msgspec.structs.replace(RECORD, tick=tick)))
    assert [record.tick for record in feed.backlog] == [2, 3]
    assert feed.missed == 1
