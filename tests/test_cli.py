"""`dynamo serve` as a person types it: options, errors, exit codes."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from nats_server import NatsServer

from dynamo_poa import __version__
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import RouterConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.cli import dynamo_main
from dynamo_poa.serve.mock_model import ensure_mock_model
from dynamo_poa.serve.prepare import make_plan

PLAIN = "plain_graph_of_test_cli"


@pytest.fixture(autouse=True)
def plain_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a frontend and workers below the current directory."""
    (tmp_path / f"{PLAIN}.py").write_text(
        "from components.frontend import Frontend\nfrom components.worker import Worker\n"
        "Frontend.link(Worker)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `dynamo` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["dynamo", *arguments])
    with pytest.raises(SystemExit) as left:
        dynamo_main()
    return int(left.value.code or 0)


def test_dry_run_prints_the_plan_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--dry-run` prints the resolved configuration and every command line."""
    code = run(
        monkeypatch, "serve", f"{PLAIN}:Frontend", "--dry-run", "--Worker.workers=2", "Common.namespace=blue"
    )
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("# ")][1:] == [
        *("# environment of every process", "# 1. nats", "# 2. worker-0", "# 3. worker-1", "# 4. frontend")
    ]
    assert "  namespace: blue\n" in out
    assert not (tmp_path / "dynamo-poa").exists()


def test_options_may_follow_or_precede_the_graph_and_take_values_either_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dynamo's SDK read both `--Worker.workers=3` and `--Worker.workers 3`."""
    assert run(monkeypatch, "serve", "--Worker.workers", "3", f"{PLAIN}:Frontend", "--dry-run") == 0
    assert "  workers: 3\n" in capsys.readouterr().out
    assert run(monkeypatch, "serve", "--Worker.workers=3", f"{PLAIN}:Frontend", "--dry-run") == 0
    assert "  workers: 3\n" in capsys.readouterr().out
    assert run(monkeypatch, "serve", f"{PLAIN}:Frontend", "--Worker.workers", "3", "--dry-run") == 0
    assert "  workers: 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "errors"),
    [
        (
            ["--Worker.gpus", "--Worker.workers", "2", f"{PLAIN}:Frontend"],
            ["Worker.gpus: needs a value, as in --Worker.gpus=VALUE"],
        ),
        (
            [f"{PLAIN}:Frontend", "--Worker.workers"],
            ["Worker.workers: needs a value, as in --Worker.workers=VALUE"],
        ),
        (
            ["--dryrun", f"{PLAIN}:Frontend", "--dry_run"],
            [
                "'--dryrun': unknown option; overrides read --Component.key=value",
                "'--dry_run': unknown option; overrides read --Component.key=value",
            ],
        ),
    ],
)
def test_an_option_is_never_taken_for_another_ones_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], errors: list[str]
) -> None:
    """Nothing that was typed is swallowed, the graph's name included."""
    assert run(monkeypatch, "serve", *options, "Frontend.http_port=0") == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {error}" for error in errors]


@pytest.mark.parametrize(
    ("flag", "mode"),
    [("--adaptive", "active"), ("--no-adaptive", "off"), ("--PoaController.mode=shadow", "shadow")],
)
def test_adaptive_is_the_controllers_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, mode: str
) -> None:
    """`--adaptive` / `--no-adaptive` are PoaController.mode active / off."""
    options = ["graphs.disagg_poa:Frontend", "-f", "graphs/disagg_poa.yaml", "--dry-run"]
    assert run(monkeypatch, "serve", *options, flag) == 0
    out = capsys.readouterr().out
    assert f"PoaController:\n  mode: '{mode}'\n" in out or f"PoaController:\n  mode: {mode}\n" in out


def test_everything_wrong_is_said_at_once_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken_port: int, tmp_path: Path
) -> None:
    """Bad input: key, value and bound, all problems at once, exit 2, nothing left running."""
    (tmp_path / "weights").mkdir()
    code = run(
        monkeypatch,
        "serve",
        f"{PLAIN}:Frontend",
        "--Worker.workers=0",
        f"--Frontend.http_port={taken_port}",
        "--Common.nats_url=nats://127.0.0.1:1",
        f"--Common.model_path={tmp_path}/weights",
        "--loud",
    )
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: '--loud': unknown option; overrides read --Component.key=value",
        "error: Worker.workers = 0: must be in [1, 1024]",
        f"error: Frontend.http_port = {taken_port}: the port is in use on 127.0.0.1, or may not be "
        "listened on",
        "error: Common.nats_url = 'nats://127.0.0.1:1': cannot be reached ([Errno 111] Connection refused)",
        f"error: Common.model_path = '{tmp_path}/weights': {tmp_path}/weights has no tokenizer.json",
    ]
    assert not (tmp_path / "dynamo-poa").exists()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "Common.model_path=./missing",
            "Common.model_path = './missing': {cwd}/missing is not a directory",
        ),
        ("Worker.engine=vllm", "Worker.engine = 'vllm': the package vllm is not installed"),
        ("Worker.engine=trtllm", "Worker.engine = 'trtllm': the package tensorrt_llm is not installed"),
        (
            "Common.nats_url=nats://127.0.0.1:{port}",
            "Common.nats_url = 'nats://127.0.0.1:{port}': cannot be reached",
        ),
        ("Common.discovery=etcd://127.0.0.1:1", "Common.discovery = 'etcd://127.0.0.1:1': cannot be reached"),
        ("Frontend.http_host=no.such.host.invalid", "Frontend.http_host = 'no.such.host.invalid': "),
    ],
)
def test_what_this_machine_cannot_give_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    taken_port: int,
    override: str,
    problem: str,
) -> None:
    """Bad input: exit 2 and one clear line."""
    monkeypatch.setattr("dynamo_poa.serve.checks._TIMEOUT_S", 0.2)
    if "http_host" not in override:
        override += " Frontend.http_port=0"
    code = run(monkeypatch, "serve", f"{PLAIN}:Frontend", *override.format(port=taken_port).split())
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("error: " + problem.format(cwd=tmp_path, port=taken_port))


def answering(nats_url: str, namespace: str) -> AbstractAsyncContextManager[Bus]:
    """Return a bus on which something answers for the namespace as its controller would."""
    bus = Bus(nats_url, name="controller", clock=SystemClock())
    bus.respond(f"poa.{namespace}.control", lambda _: b'{"ok":false,"error":"no tick yet"}')
    return bus


async def test_a_namespace_that_a_controller_runs_already_is_refused(nats_server: NatsServer) -> None:
    """Two graphs of one namespace on one NATS would steer each other: refused before anything starts."""
    overrides = [f"Common.nats_url={nats_server.url}", "Frontend.http_port=0"]
    async with answering(nats_server.url, "poa") as bus:
        await bus.wait_connected(5)
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(make_plan, f"{PLAIN}:Frontend", None, overrides)
        assert caught.value.problems == (
            f"Common.namespace = 'poa': a controller already runs it at {nats_server.url}; "
            "choose another namespace or stop it",
        )
        other = await asyncio.to_thread(
            make_plan, f"{PLAIN}:Frontend", None, [*overrides, "Common.namespace=other"]
        )
        assert other.namespace == "other"
    free = make_plan(f"{PLAIN}:Frontend", None, overrides)  # from within a loop, as programs do
    assert free.namespace == "poa"


def test_two_keys_may_not_ask_for_one_port() -> None:
    """Found before the second process fails to listen."""
    with pytest.raises(ConfigError) as caught:
        make_plan(
            "graphs.disagg_poa:Frontend",
            overrides=["Frontend.http_port=28471", "PoaRouter.metrics_port=28470", "PoaRouter.replicas=2"],
        )
    assert caught.value.problems == ("PoaRouter.metrics_port = 28471: must differ from Frontend.http_port",)


def test_a_model_directory_with_a_tokenizer_will_do(tmp_path: Path) -> None:
    """A relative path is made absolute: the frontend resolves it elsewhere."""
    ensure_mock_model(tmp_path / "mine")
    plan = make_plan(f"{PLAIN}:Frontend", overrides=["Common.model_path=mine", "Frontend.http_port=0"])
    (worker,) = [process for process in plan.processes if process.name == "worker-0"]
    assert worker.argv[worker.argv.index("--model-path") + 1] == str(tmp_path / "mine")


def test_dynamos_router_policy_file_must_be_there(tmp_path: Path) -> None:
    """Routers read it when they start: found missing before that, and made absolute."""
    overrides = ["Frontend.http_port=0", "PoaRouter.policy_config=policy.yaml"]
    with pytest.raises(ConfigError) as caught:
        make_plan("graphs.disagg_poa:Frontend", overrides=overrides)
    assert caught.value.problems == ("PoaRouter.policy_config = 'policy.yaml': no such file",)
    (tmp_path / "policy.yaml").write_text("")
    router = make_plan("graphs.disagg_poa:Frontend", overrides=overrides).sections["PoaRouter"]
    assert isinstance(router, RouterConfig)
    assert router.policy_config == str(tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["nothing_here:Frontend"],
            "error: graph module 'nothing_here' does not exist, neither installed nor in ",
        ),
        (["--Worker.workers=3"], "error: no graph given: must be module:Component"),
        ([f"{PLAIN}:Back"], f"error: graph '{PLAIN}:Back': {PLAIN} has no component Back"),
        ([f"{PLAIN}:Frontend", "-f", "none.yaml"], "error: -f none.yaml: no such file"),
    ],
)
def test_what_does_not_exist_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    """Unknown graph module, attribute, file: exit 2."""
    assert run(monkeypatch, "serve", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(error)


def test_a_graph_that_does_not_come_up_exits_1_with_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A crash during the start: stop all, say what the process said last."""
    (tmp_path / "crashing.py").write_text(
        "import sys\n"
        "from dynamo_poa.config import FrontendConfig\n"
        "from dynamo_poa.serve.graph import Component, HttpOk, Process, Stage\n"
        "from components.worker import Worker\n"
        "def processes(config, site):\n"
        "    argv = (sys.executable, '-I', '-c', 'import sys; sys.exit(\"no licence\")')\n"
        "    return [Process(name='frontend', stage=Stage.NATS, argv=argv, ready=HttpOk('http://127.0.0.1:1'))]\n"
        "Frontend = Component('Frontend', FrontendConfig, processes)\n"
        "Frontend.link(Worker)\n"
    )
    monkeypatch.setattr("dynamo_poa.serve.child.FIRST_BACKOFF_S", 0.01)
    assert run(monkeypatch, "serve", "crashing:Frontend", "Frontend.http_port=0") == 1
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert said == [
        "error: frontend ended 4 times before it was ready, last with status 1; it said:",
        *["  no licence"] * 4,
    ]
    assert not (tmp_path / "dynamo-poa").exists()


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version`."""
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"dynamo-poa {__version__}\n"


def test_a_command_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dynamo` has `serve` alone."""
    assert run(monkeypatch, "build", "x") == 2
    assert capsys.readouterr().err == "error: no such command 'build'\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["serve"], "missing argument 'graph'"),
        (["serve", "x:y", "-f"], "option '-f' requires an argument"),
        (["serve", "x:y", "--start-timeout", "soon"], "invalid value for '--start-timeout': "),
        (["--loud"], "no such option: --loud"),
    ],
)
def test_what_cannot_be_parsed_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    """Every error is `error: ...` and exit 2, the option parser's own included."""
    assert run(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error}")


def test_without_a_command_there_is_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever types `dynamo` alone wants to know what it takes."""
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Usage: ")
