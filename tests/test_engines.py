"""Command lines of every engine, whether it is installed here or not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Ports

from components.worker import DecodeWorker, PrefillWorker, Worker
from dynamo_poa.config import CommonConfig, WorkerConfig
from dynamo_poa.serve.flags import flags
from dynamo_poa.serve.graph import Component, Process, Registered, Site, Stage

COMMON = CommonConfig(namespace="poa", model_path="/models/llama", model_name="llama", block_size=32)


def processes(pool: Component, bootstrap: bool = True, **keys: Any) -> list[Process]:
    """Return the processes of a pool whose ports begin at 21000."""
    site = Site(common=COMMON, config_path=Path("/run/config.json"), bootstrap=bootstrap, ports=Ports())
    return pool.processes(WorkerConfig(**keys), site)


def arguments(process: Process) -> str:
    """Return the command line after `python -P -m`."""
    assert process.argv[:3] == (sys.executable, "-P", "-m")
    return " ".join(process.argv[3:])


def test_a_mock_prefill_pool_spreads_over_processes_with_bootstrap_ports() -> None:
    """Without bootstrap ports the mock decode worker prefills again (measured, Dynamo 1.4.2)."""
    pool = processes(PrefillWorker, workers=3, per_process=2, args={"speedup-ratio": 0.5})
    common = (
        "dynamo.mocker --model-path /models/llama --model-name llama "
        "--endpoint dyn://poa-workers.prefill.generate --disaggregation-mode prefill"
    )
    assert [process.name for process in pool] == ["prefill-0", "prefill-1"]
    assert [arguments(process) for process in pool] == [
        f"{common} --num-workers 2 --block-size 32 --bootstrap-ports 21000,21001 --speedup-ratio 0.5",
        f"{common} --num-workers 1 --block-size 32 --bootstrap-ports 21002 --speedup-ratio 0.5",
    ]
    assert {process.ready for process in pool} == {Registered("poa-workers.prefill.generate", 3)}
    assert {process.stage for process in pool} == {Stage.WORKERS}


@pytest.mark.parametrize(
    ("of", "spread"),
    [
        ({3: 0.04}, [(3, 0.2), (1, 0.04), (1, 0.2)]),
        ({0: 0.04}, [(1, 0.04), (4, 0.2)]),
        ({1: 1, 2: 2}, [(1, 0.2), (1, 1), (1, 2), (2, 0.2)]),
    ],
)
def test_a_worker_with_flags_of_its_own_is_alone_in_its_process(
    of: dict[int, float], spread: list[tuple[int, float]]
) -> None:
    """Its flags go over the pool's; the other workers share processes as before, in order."""
    args_of = {number: {"speedup-ratio": ratio} for number, ratio in of.items()}
    pool = processes(
        DecodeWorker,
        workers=5,
        per_process=4,
        args={"speedup-ratio": 0.2, "max-num-seqs": 8},
        args_of=args_of,
    )
    assert [arguments(process).partition("--num-workers ")[2] for process in pool] == [
        f"{workers} --block-size 32 --speedup-ratio {ratio} --max-num-seqs 8" for workers, ratio in spread
    ]
    assert [process.name for process in pool] == [f"decode-{index}" for index in range(len(spread))]


def test_a_mock_prefill_worker_has_no_bootstrap_port_when_legs_follow_each_other() -> None:
    """Sequential hand-over: `PoaRouter.legs: [prefill]`."""
    (prefill,) = processes(PrefillWorker, bootstrap=False)
    assert "--bootstrap-ports" not in prefill.argv


@pytest.mark.parametrize(
    ("pool", "name", "component", "mode"),
    [(DecodeWorker, "decode-0", "backend", "decode"), (Worker, "worker-0", "backend", "agg")],
)
def test_mock_decode_and_aggregated_workers_serve_the_backend(
    pool: Component, name: str, component: str, mode: str
) -> None:
    """Dynamo's own component names: the frontend's card and subjects carry them."""
    (process,) = processes(pool)
    assert process.name == name
    assert arguments(process) == (
        "dynamo.mocker --model-path /models/llama --model-name llama "
        f"--endpoint dyn://poa-workers.{component}.generate --disaggregation-mode {mode} "
        "--num-workers 1 --block-size 32"
    )
    assert process.env == {}


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def vllm_events(port: int) -> dict[str, object]:
    """Return vLLM's event configuration."""
    return {
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{port}",
        "enable_kv_cache_events": True,
    }


@pytest.mark.parametrize(
    ("pool", "component", "mode", "configurations", "env"),
    [
        (
            PrefillWorker,
            "prefill",
            "prefill",
            {"--kv-events-config": vllm_events(21_001), "--kv-transfer-config": NIXL},
            {"DYN_FORWARDPASS_METRIC_PORT": "21000", "VLLM_NIXL_SIDE_CHANNEL_PORT": "21002"},
        ),
        (
            DecodeWorker,
            "backend",
            "decode",
            {"--kv-transfer-config": NIXL},
            {"DYN_FORWARDPASS_METRIC_PORT": "21000", "VLLM_NIXL_SIDE_CHANNEL_PORT": "21001"},
        ),
        (
            Worker,
            "backend",
            "agg",
            {"--kv-events-config": vllm_events(21_001)},
            {"DYN_FORWARDPASS_METRIC_PORT": "21000"},
        ),
    ],
)
def test_vllm_is_told_its_role_its_events_and_its_transfer(
    pool: Component, component: str, mode: str, configurations: dict[str, Any], env: dict[str, str]
) -> None:
    """dynamo/vllm/args.py, Dynamo 1.4.2: prefill refuses to start without --kv-transfer-config."""
    (process,) = processes(pool, engine="vllm", args={"tensor-parallel-size": 2, "enforce-eager": True})
    expected = (
        "dynamo.vllm --model /models/llama --served-model-name llama "
        f"--endpoint dyn://poa-workers.{component}.generate --disaggregation-mode {mode} --block-size 32"
    )
    for flag, value in configurations.items():
        expected += f" {flag} {json.dumps(value)}"
    assert arguments(process) == f"{expected} --tensor-parallel-size 2 --enforce-eager"
    assert process.env == env


def test_a_given_transfer_configuration_replaces_ours() -> None:
    """`args` are the user's: they win over what is only a default."""
    (process,) = processes(
        PrefillWorker, engine="vllm", args={"kv-transfer-config": {"kv_connector": "LMCache"}}
    )
    position = process.argv.index("--kv-transfer-config")
    assert process.argv[position + 1] == '{"kv_connector": "LMCache"}'
    assert process.argv.count("--kv-transfer-config") == 1


@pytest.mark.parametrize(
    ("pool", "component", "role_flags", "env"),
    [
        (
            PrefillWorker,
            "prefill",
            " --disaggregation-mode prefill --disaggregation-transfer-backend nixl"
            " --disaggregation-bootstrap-port 21000"
            ' --kv-events-config {"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:21001"}',
            {"DYN_FORWARDPASS_METRIC_PORT": "21002"},
        ),
        (
            DecodeWorker,
            "backend",
            " --disaggregation-mode decode --disaggregation-transfer-backend nixl",
            {"DYN_FORWARDPASS_METRIC_PORT": "21000"},
        ),
        (
            Worker,
            "backend",
            ' --kv-events-config {"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:21000"}',
            {"DYN_FORWARDPASS_METRIC_PORT": "21001"},
        ),
    ],
)
def test_sglang_is_told_its_role_and_its_bootstrap_port(
    pool: Component, component: str, role_flags: str, env: dict[str, str]
) -> None:
    """dynamo/sglang/args.py, Dynamo 1.4.2: aggregated is what it is without a mode; pages are blocks."""
    (process,) = processes(pool, engine="sglang", args={"tp": 2})
    assert arguments(process) == (
        "dynamo.sglang --model-path /models/llama --served-model-name llama "
        f"--endpoint dyn://poa-workers.{component}.generate --page-size 32 --enable-metrics"
        f"{role_flags} --tp 2"
    )
    assert process.env == env


@pytest.mark.parametrize(
    ("pool", "component", "mode", "events"),
    [
        (PrefillWorker, "prefill", "prefill", " --publish-kv-events"),
        (DecodeWorker, "backend", "decode", ""),
        (Worker, "backend", "agg", " --publish-kv-events"),
    ],
)
def test_trtllm_is_told_its_role_and_to_publish_events(
    pool: Component, component: str, mode: str, events: str
) -> None:
    """dynamo/trtllm/backend_args.py, Dynamo 1.4.2."""
    (process,) = processes(pool, engine="trtllm", args={"extra-engine-args": "/etc/engine.yaml"})
    assert arguments(process) == (
        "dynamo.trtllm --model /models/llama --served-model-name llama "
        f"--endpoint dyn://poa-workers.{component}.generate --disaggregation-mode {mode} --kv-block-size 32"
        f"{events} --extra-engine-args /etc/engine.yaml"
    )


def test_gpus_are_shared_out_evenly_and_in_order() -> None:
    """Workers of one machine must not meet on one GPU."""
    pool = processes(DecodeWorker, engine="vllm", workers=2, gpus=(4, 5, 6, 7), env={"NCCL_DEBUG": "WARN"})
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in pool] == ["4,5", "6,7"]
    assert [process.env["NCCL_DEBUG"] for process in pool] == ["WARN", "WARN"]


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        (
            {"engine": "vllm", "per_process": 2, "workers": 2},
            ["PrefillWorker.per_process = 2: must be 1 with engine vllm"],
        ),
        (
            {"workers": 2, "gpus": (0, 1, 2)},
            ["PrefillWorker.gpus = [0, 1, 2]: must be a multiple of PrefillWorker.workers = 2"],
        ),
        (
            {"args": {"block_size": 64, "endpoint": "dyn://a.b.c"}},
            [
                "PrefillWorker.args.block_size = 64: set Common.block_size instead",
                "PrefillWorker.args.endpoint = 'dyn://a.b.c': set Common.namespace instead",
            ],
        ),
        (
            {"workers": 2, "args_of": {1: {"num-workers": 2}}},
            ["PrefillWorker.args_of.1.num-workers = 2: set per_process instead"],
        ),
    ],
)
def test_a_pool_refuses_what_cannot_work(keys: dict[str, Any], problems: list[str]) -> None:
    """A block size that differs from the router's makes every overlap 0, silently (measured)."""
    assert PrefillWorker.problems(WorkerConfig(**keys)) == problems


def test_flags_follow_the_kinds_of_yaml_values() -> None:
    """One rule for every engine."""
    values = {"a": 1.5, "b": True, "c": False, "d": None, "e": [1, "x"], "f": {"k": [1]}, "g": "two words"}
    assert flags(values) == [
        *("--a", "1.5", "--b", "--no-c", "--e", "1", "x"),
        *("--f", '{"k": [1]}', "--g", "two words"),
    ]
