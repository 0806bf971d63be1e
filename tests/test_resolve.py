"""Configuration and plan of a graph, by exact values."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import Controller, Ports, Router, graph_of

from components.frontend import Frontend
from components.worker import DecodeWorker, PrefillWorker, Worker
from dynamo_poa.config import CommonConfig, ControllerConfig, FrontendConfig, RegimeConfig, RouterConfig
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import Component, HttpOk, ModelListed, NatsReady, Registered
from dynamo_poa.serve.plan import Plan, lay_out, nats_server
from dynamo_poa.serve.resolve import apply_overrides, configure, find_file, read_file

RUN_DIR = Path("/run/poa")
DISAGGREGATED = (Frontend, Router, PrefillWorker, DecodeWorker, Controller)
AGGREGATED = (Frontend, Router, Worker, Controller)


def problems_of(components: Iterable[Component], raw: dict[str, Any]) -> list[str]:
    """Return what is wrong with a configuration."""
    return configure(graph_of(*components), raw)[1]


def plan_of(components: Iterable[Component], raw: dict[str, Any] | None = None) -> Plan:
    """Return the plan of a configuration that must have no problems."""
    configuration, problems = configure(graph_of(*components), raw or {})
    assert problems == []
    return lay_out(configuration, RUN_DIR, Ports(), environ={})


def command(plan: Plan, name: str) -> str:
    """Return one process's command line without the interpreter."""
    (process,) = [process for process in plan.processes if process.name == name]
    return " ".join(process.argv).replace(f"{sys.executable} -P -m ", "")


def test_overrides_reach_nested_keys_and_are_read_as_yaml() -> None:
    """`--PoaController.regime.theta1=3` and `PoaRouter.legs=[prefill]`."""
    raw = {"PoaController": {"regime": {"theta2": 9}}, "PoaRouter": None}
    sections, problems = apply_overrides(
        raw,
        [
            "--PoaController.regime.theta1=3",
            "PoaRouter.legs=[prefill]",
            "--PrefillWorker.args.speedup-ratio=0.5",
            "Common.model_name='7'",
            "--Frontend.args.router-mode=",
        ],
    )
    assert problems == []
    assert sections == {
        "PoaController": {"regime": {"theta1": 3, "theta2": 9}},
        "PoaRouter": {"legs": ["prefill"]},
        "PrefillWorker": {"args": {"speedup-ratio": 0.5}},
        "Common": {"model_name": "7"},
        "Frontend": {"args": {"router-mode": None}},
    }
    assert raw == {"PoaController": {"regime": {"theta2": 9}}, "PoaRouter": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("off", "off"), ("on", "on"), ("yes", "yes"), ("no", "no"), ("true", True), ("False", False)),
        *(("1e3", 1000.0), ("1.5", 1.5), (".5", 0.5), ("-2", -2), ("7", 7), ("0x10", 16), ("1.4.2", "1.4.2")),
        *((".inf", float("inf")), ("~", None), ("", None), ("[0.8, 0.1]", [0.8, 0.1]), ("e3", "e3")),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """`PoaController.mode=off` is a mode; PyYAML's own 1.1 would make it false."""
    sections, _ = apply_overrides({}, [f"A.b={text}"])
    assert sections == {"A": {"b": value}}
    assert type(sections["A"]["b"]) is type(value)


def test_a_worker_of_the_file_is_the_same_one_in_an_override() -> None:
    """YAML reads `3:` as a number, a path has text; the flags of both are one worker's."""
    sections, problems = apply_overrides(
        {"DecodeWorker": {"workers": 4, "args_of": {3: {"speedup-ratio": 0.2, "max-num-seqs": 8}}}},
        ["--DecodeWorker.args_of.3.speedup-ratio=0.1", "--DecodeWorker.args_of.0={speedup-ratio: 2}"],
    )
    assert problems == []
    plan = plan_of(DISAGGREGATED, sections)
    flags = [command(plan, f"decode-{number}").partition(" --block-size 16")[2] for number in range(4)]
    assert flags == [" --speedup-ratio 2", "", "", " --speedup-ratio 0.1 --max-num-seqs 8"]
    assert "args_of:\n    3:\n      speedup-ratio: 0.1\n" in plan.text()


def test_overrides_that_cannot_be_understood_are_all_named() -> None:
    """Bad input: all problems at once."""
    _, problems = apply_overrides(
        {"Frontend": {"http_port": 1}},
        [
            *("--verbose", "replicas=2", "PoaRouter..legs=1", "PoaRouter.legs=[", "Frontend.http_port.x=1"),
            *("--PoaRouter.replicas", "PoaRouter.legs=2026-13-40"),
        ],
    )
    assert problems == [
        "'--verbose': unknown option; overrides read --Component.key=value",
        "'replicas=2': unknown option; overrides read --Component.key=value",
        "'PoaRouter..legs=1': unknown option; overrides read --Component.key=value",
        "PoaRouter.legs = '[': not a YAML value",
        "Frontend.http_port.x = '1': Frontend.http_port holds a value, not keys",
        "PoaRouter.replicas: needs a value, as in --PoaRouter.replicas=VALUE",
        "PoaRouter.legs = '2026-13-40': not a YAML value",
    ]


def test_every_problem_of_a_file_is_reported_at_once() -> None:
    """One message naming key, value and bound, all problems together."""
    assert problems_of(
        DISAGGREGATED,
        {
            "Common": {"namespace": "a.b", "block_size": 0},
            "Frontend": {"http_port": "eighty", "args": {"namespace": "x"}},
            "PoaRouter": {"replica": 2},
            "PrefilWorker": {"workers": 2},
            "DecodeWorker": {"workers": 0},
            "PoaController": {"regime": {"theta1": -1}, "mode": "on"},
        },
    ) == [
        "PrefilWorker (workers): graphs.test:Frontend has no such component; did you mean PrefillWorker?; "
        "it has: Common, Frontend, PoaRouter, PrefillWorker, DecodeWorker, PoaController",
        "Common.block_size = 0: must be in [1, 4096]",
        "Common.namespace = 'a.b': must be letters, digits, - and _ (it is one token of a subject)",
        "Frontend.http_port = 'eighty': expected `int`, got `str`",
        "PoaRouter.replica = 2: unknown key; did you mean replicas?",
        "DecodeWorker.workers = 0: must be in [1, 1024]",
        "PoaController.regime.theta1 = -1: must be > 0 and <= 1e+06",
        "PoaController.mode = 'on': must be one of off, shadow, active",
    ]


@pytest.mark.parametrize(
    ("workers", "problems"),
    [
        (
            {"workers": 4, "args_of": {4: {"speedup-ratio": 0.2}, "-1": {}}},
            [
                "DecodeWorker.args_of.4 = {'speedup-ratio': 0.2}: must be the number of a worker, "
                "in [0, DecodeWorker.workers - 1 = 3]",
                "DecodeWorker.args_of.-1 = {}: must be the number of a worker, "
                "in [0, DecodeWorker.workers - 1 = 3]",
            ],
        ),
        (
            {"args_of": {"slow": {"speedup-ratio": 0.2}}},
            [
                "DecodeWorker.args_of = {'slow': {'speedup-ratio': 0.2}}: "
                "expected `int`, got `str` - at `key` in `$`"
            ],
        ),
        (
            {"args_of": {0: 0.2}},
            ["DecodeWorker.args_of = {0: 0.2}: expected `object`, got `float` - at `$[...]`"],
        ),
        ({"workers": 0, "args_of": {7: {}}}, ["DecodeWorker.workers = 0: must be in [1, 1024]"]),
    ],
)
def test_flags_of_a_worker_that_the_pool_lacks_are_refused(
    workers: dict[str, Any], problems: list[str]
) -> None:
    """Key, value and bound; how many workers there are is not judged by a count that is itself wrong."""
    assert problems_of(DISAGGREGATED, {"DecodeWorker": workers}) == problems


@pytest.mark.parametrize(
    ("controller", "problems"),
    [
        (
            {"regime": {"theta1": 9, "theta2": 8, "window_s": 0}, "lease_s": 1, "tick_s": 0},
            [
                "PoaController.regime.window_s = 0: must be > 0 and <= 600",
                "PoaController.regime.theta2 = 8: must be > PoaController.regime.theta1 = 9",
                "PoaController.tick_s = 0: must be in [0.05, 60]",
                "PoaController.lease_s = 1: must be >= 2 x heartbeat_s = 2",
            ],
        ),
        # A rule about a key that is itself wrong would judge the key's default, which nobody asked for.
        (
            {"regime": {"theta1": -1, "theta2": 2}},
            ["PoaController.regime.theta1 = -1: must be > 0 and <= 1e+06"],
        ),
        (
            {"policy": {"below": [float("nan"), 3], "saturated": [0.8, -0.1]}},
            [
                "PoaController.policy.below[0] (τ) = nan: must be finite and in [0, 100]",
                "PoaController.policy.below[1] (ω) = 3: must be in [0, 2]",
                "PoaController.policy.saturated[1] (ω) = -0.1: must be in [0, 2]",
            ],
        ),
        (
            {"policy": {"below": [0.1]}},
            ["PoaController.policy.below = [0.1]: expected `array` of length 2, got 1"],
        ),
    ],
)
def test_rules_of_a_section_are_judged_beside_its_bad_keys(
    controller: dict[str, Any], problems: list[str]
) -> None:
    """All problems at once, under full paths: what spans keys does not wait for the keys to be right."""
    assert problems_of(DISAGGREGATED, {"PoaController": controller}) == problems


def test_a_section_made_in_code_keeps_the_same_rules() -> None:
    """However an object came to be, it is within its bounds; messages carry the full path."""
    with pytest.raises(ConfigError) as caught:
        RegimeConfig(theta1=9.0, theta2=8.0, window_s=0.0)
    assert caught.value.problems == (
        "PoaController.regime.window_s = 0.0: must be > 0 and <= 600",
        "PoaController.regime.theta2 = 8: must be > PoaController.regime.theta1 = 9",
    )


@pytest.mark.parametrize(
    ("components", "raw", "problems"),
    [
        (
            AGGREGATED,
            {},
            ["PoaRouter.legs = ['prefill', 'decode']: must be one of ['aggregated'] (the graph's workers)"],
        ),
        (
            DISAGGREGATED,
            {"PoaRouter": {"legs": ["decode"]}},
            [
                "PoaRouter.legs = ['decode']: must be one of ['prefill', 'decode'], ['prefill'] "
                "(the graph's workers)"
            ],
        ),
        (
            DISAGGREGATED,
            {
                "PoaRouter": {"legs": ["prefill"]},
                "Common": {"handover": "bootstrap"},
                "PrefillWorker": {"engine": "sglang"},
            },
            [
                "Common.handover = 'bootstrap': PoaRouter.legs = [prefill] needs sequential hand-over",
                "PrefillWorker.engine = 'sglang': PoaRouter.legs = [prefill] needs sequential hand-over, "
                "which SGLang does not do",
            ],
        ),
        (
            DISAGGREGATED,
            {"PoaRouter": {"metrics_port": 65_535, "replicas": 3}},
            [
                "PoaRouter.metrics_port = 65535: the last of 3 replicas would listen on 65537, "
                "must be <= 65535"
            ],
        ),
        (
            DISAGGREGATED,
            {"Common": {"nats_url": "localhost:4222", "discovery": "etcd://host"}},
            [
                "Common.nats_url = 'localhost:4222': must be embedded or nats://host:port",
                "Common.discovery = 'etcd://host': must be file, kubernetes or etcd://host:port",
            ],
        ),
        (
            DISAGGREGATED,
            {"DecodeWorker": {"args": {"block-size": 64}}, "Frontend": {"args": {"http-port": 1}}},
            [
                "Frontend.args.http-port = 1: set Frontend.http_port instead",
                "DecodeWorker.args.block-size = 64: set Common.block_size instead",
            ],
        ),
        ((Router, Worker), {}, ["graph 'graphs.test:Frontend': must name its Frontend"]),
        ((Frontend,), {}, ["graph 'graphs.test:Frontend': links no workers"]),
    ],
)
def test_rules_between_keys_are_checked(
    components: tuple[Component, ...], raw: dict[str, Any], problems: list[str]
) -> None:
    """What no single key's bound can say."""
    found = problems_of(components, raw)
    assert [problem for problem in problems if problem not in found] == []
    if components[0] is Frontend:
        assert found == problems


def test_a_request_goes_on_at_another_router_unless_configured_otherwise() -> None:
    """Without it all requests on a killed router fail. Source: measured, make soak."""
    start = (
        "dynamo.frontend --namespace poa --http-host 127.0.0.1 --http-port 21001 --router-mode round-robin"
    )
    for args, shown in (({}, "3"), ({"migration-limit": 0}, "0")):
        plan = plan_of(DISAGGREGATED, {"Frontend": {"http_port": 0, "args": args}})
        assert command(plan, "frontend") == f"{start} --migration-limit {shown}"


def test_the_plan_of_a_disaggregated_graph_starts_everything_in_order() -> None:
    """NATS, workers, routers, controller, frontend; each with the probe it is awaited by."""
    plan = plan_of(
        DISAGGREGATED,
        {
            "PrefillWorker": {"workers": 2},
            "DecodeWorker": {"workers": 3, "per_process": 3, "args": {"speedup-ratio": 2}},
            "PoaRouter": {"replicas": 2},
            "Frontend": {"http_port": 0, "args": {"migration-limit": 1}},
        },
    )
    names = ["nats", "prefill-0", "prefill-1", "decode-0", "router-0", "router-1", "controller", "frontend"]
    assert [process.name for process in plan.processes] == names
    model = "--model-path /run/poa/model --model-name mock-llama-3.1-70b"
    assert {name: command(plan, name) for name in names} == {
        "nats": f"{nats_server()} --addr 127.0.0.1 --port 21000 --jetstream --store_dir /run/poa/nats",
        "prefill-0": f"dynamo.mocker {model} --endpoint dyn://poa-workers.prefill.generate "
        "--disaggregation-mode prefill --num-workers 1 --block-size 16 --bootstrap-ports 21005",
        "prefill-1": f"dynamo.mocker {model} --endpoint dyn://poa-workers.prefill.generate "
        "--disaggregation-mode prefill --num-workers 1 --block-size 16 --bootstrap-ports 21006",
        "decode-0": f"dynamo.mocker {model} --endpoint dyn://poa-workers.backend.generate "
        "--disaggregation-mode decode --num-workers 3 --block-size 16 --speedup-ratio 2",
        "router-0": "router --config /run/poa/config.json --replica 0",
        "router-1": "router --config /run/poa/config.json --replica 1",
        "controller": "controller --config /run/poa/config.json",
        "frontend": "dynamo.frontend --namespace poa --http-host 127.0.0.1 --http-port 21001 "
        "--router-mode round-robin --migration-limit 1",
    }
    assert [process.ready for process in plan.processes] == [
        NatsReady("nats://127.0.0.1:21000"),
        Registered("poa-workers.prefill.generate", 2),
        Registered("poa-workers.prefill.generate", 2),
        Registered("poa-workers.backend.generate", 3),
        HttpOk("http://127.0.0.1:21002/health"),
        HttpOk("http://127.0.0.1:21003/health"),
        HttpOk("http://127.0.0.1:21004/health"),
        ModelListed("http://127.0.0.1:21001/v1/models", "mock-llama-3.1-70b"),
    ]
    assert plan.metrics_urls == {
        "router-0": "http://127.0.0.1:21002/metrics",
        "router-1": "http://127.0.0.1:21003/metrics",
        "controller": "http://127.0.0.1:21004/metrics",
    }


def test_the_resolved_configuration_has_no_blanks_left() -> None:
    """Ports chosen, paths absolute, URLs filled in: what `--config` hands to our own processes."""
    plan = plan_of(DISAGGREGATED, {"Frontend": {"http_host": "0.0.0.0", "http_port": 8123}})
    common, frontend, router, controller = (
        plan.sections[name] for name in ("Common", "Frontend", "PoaRouter", "PoaController")
    )
    assert common == CommonConfig(nats_url="nats://127.0.0.1:21000", model_path="/run/poa/model")
    assert frontend == FrontendConfig(http_host="0.0.0.0", http_port=8123)
    assert router == RouterConfig(metrics_port=21_001)
    assert controller == ControllerConfig(metrics_port=21_002, frontend_url="http://127.0.0.1:8123")
    assert (plan.nats_url, plan.http_url) == ("nats://127.0.0.1:21000", "http://127.0.0.1:8123")


LOOPBACK = {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "lo"}
EVERYWHERE = {
    "DYN_EVENT_PLANE": "nats",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_SELF_HOST_METADATA": "0",
    "DYN_RUNTIME_INHIBITED_DURATION_SECS": "1",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "PYTHONUNBUFFERED": "1",
}
HUB = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/run/poa/hub"}


@pytest.mark.parametrize(
    ("common", "env", "discovery"),
    [
        (
            {},
            {
                "NATS_SERVER": "nats://127.0.0.1:21000",
                "DYN_DISCOVERY_BACKEND": "file",
                "DYN_FILE_KV": "/run/poa/discovery",
                **LOOPBACK,
                **HUB,
            },
            RUN_DIR / "discovery",
        ),
        (
            {"nats_url": "nats://bus:4222", "discovery": "etcd://store:2379", "model_path": "org/model"},
            {
                "NATS_SERVER": "nats://bus:4222",
                "DYN_DISCOVERY_BACKEND": "etcd",
                "ETCD_ENDPOINTS": "http://store:2379",
            },
            "http://store:2379",
        ),
        (
            {"nats_url": "nats://bus:4222", "discovery": "kubernetes", "model_path": "/models/llama"},
            {"NATS_SERVER": "nats://bus:4222", "DYN_DISCOVERY_BACKEND": "kubernetes", **HUB},
            "",
        ),
    ],
)
def test_every_process_gets_the_same_environment(
    common: dict[str, str], env: dict[str, str], discovery: Path | str
) -> None:
    """dynamo-facts 2 and 7: the event plane must be named, loopback only where all is on this machine."""
    plan = plan_of(AGGREGATED, {"Common": common, "PoaRouter": {"legs": ["aggregated"]}})
    assert {key: value for key, value in plan.env.items() if key != "DYN_LOG"} == {**EVERYWHERE, **env}
    assert plan.env["DYN_LOG"].startswith("warn,")
    assert plan.discovery == discovery
    assert ("nats" in [process.name for process in plan.processes]) is not bool(common)


def test_a_given_log_filter_is_kept() -> None:
    """DYN_LOG is Dynamo's own variable: who sets it wants it."""
    configuration, _ = configure(graph_of(Frontend, Worker), {})
    assert lay_out(configuration, RUN_DIR, Ports(), environ={"DYN_LOG": "debug"}).env["DYN_LOG"] == "debug"


def test_with_the_prefill_leg_alone_the_frontend_sees_the_decode_workers() -> None:
    """`PoaRouter.legs: [prefill]`: decode workers in the frontend's namespace, no bootstrap."""
    plan = plan_of(DISAGGREGATED, {"PoaRouter": {"legs": ["prefill"]}})
    assert "--endpoint dyn://poa.backend.generate" in command(plan, "decode-0")
    prefill = command(plan, "prefill-0")
    assert "--endpoint dyn://poa-workers.prefill.generate" in prefill
    assert "--bootstrap-ports" not in prefill


@pytest.mark.parametrize(
    ("handover", "bootstrap"), [("auto", True), ("bootstrap", True), ("sequential", False)]
)
def test_mock_prefill_workers_bootstrap_unless_told_otherwise(handover: str, bootstrap: bool) -> None:
    """Mock graphs use bootstrap: without it the decode worker prefills again."""
    plan = plan_of(DISAGGREGATED, {"Common": {"handover": handover}})
    assert ("--bootstrap-ports" in command(plan, "prefill-0")) is bootstrap


def test_the_printed_plan_is_the_plan() -> None:
    """`--dry-run`: configuration as YAML, then environment and command lines in order."""
    plan = plan_of(AGGREGATED, {"PoaRouter": {"legs": ["aggregated"]}, "Worker": {"env": {"A": "b c"}}})
    text = plan.text()
    configuration, _, rest = text.partition("\n# environment of every process\n")
    sections = yaml.safe_load(configuration)
    assert list(sections) == ["Common", "Frontend", "PoaRouter", "Worker", "PoaController"]
    assert sections["PoaController"]["policy"]["saturated"] == [0.8, 0.1]
    assert "export DYN_EVENT_PLANE=nats\n" in rest
    assert re.findall(r"^# \d+\. .*$", rest, re.MULTILINE) == [
        *("# 1. nats", "# 2. worker-0", "# 3. router-0", "# 4. controller", "# 5. frontend")
    ]
    assert f"\n'A=b c' {sys.executable} -P -m dynamo.mocker " in rest


def test_the_file_is_taken_as_given_before_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel installed elsewhere serves the shipped graphs from any directory by the same command."""
    monkeypatch.chdir(tmp_path)
    shipped = find_file("graphs/disagg_poa.yaml")
    assert shipped == find_file("disagg_poa.yaml")
    assert set(read_file(shipped)) == {
        *("Common", "Frontend", "PoaRouter", "PrefillWorker", "DecodeWorker", "PoaController")
    }
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "disagg_poa.yaml").write_text("Common: {}\n")
    assert find_file("graphs/disagg_poa.yaml") == tmp_path / "graphs" / "disagg_poa.yaml"


@pytest.mark.parametrize("name", ["disagg_poa", "agg_poa"])
def test_the_shipped_files_are_valid(name: str) -> None:
    """Both graphs come with a YAML file that needs no change."""
    components = DISAGGREGATED if name == "disagg_poa" else AGGREGATED
    assert problems_of(components, read_file(find_file(f"graphs/{name}.yaml"))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\n", " line 3 column 1: expected ',' or ']', got '<stream end>'"),
        ("a: b: c", " line 1 column 5: mapping values are not allowed here"),
        ("a: 2026-13-40", ": month must be in 1..12"),
        ("a: \x01", ": unacceptable character #x0001: special characters are not allowed at position 3"),
        ("- one", ": must be a mapping of components to sections"),
        ("\xff", ": 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    """Bad input: never a traceback."""
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}{message}")
    assert "\n" not in problem


def test_a_missing_file_says_where_it_was_looked_for() -> None:
    """Bad input: a file that does not exist."""
    with pytest.raises(ConfigError) as caught:
        find_file("nowhere/x.yaml")
    assert caught.value.problems == (
        "-f nowhere/x.yaml: no such file, neither as given nor among the shipped graphs",
    )
