"""What can be configured, within which bounds, and what the defaults are.

Owns: one frozen Struct per component; each default stands once, beside its unit, range and meaning;
      reading them from mappings with every problem reported at once.
Does not own: where the mapping comes from (serve/resolve.py) or what is done with it.
Invariant: a configuration object that exists is within its bounds; bad input is refused, never repaired.
Source: defaults marked [paper] are arXiv 2606.17081's, [dynamo] are Dynamo 1.4.2's own, [measured] are ours.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from dynamo_poa.errors import ConfigError
from dynamo_poa.values import MAX_OVERLAP_WEIGHT, MAX_ROUTER_TEMPERATURE, Mode, Role
from dynamo_poa.yaml12 import load_yaml

T = TypeVar("T", bound="Section")


class Knob(msgspec.Struct, frozen=True):
    """What a person needs to know of one key: meaning, unit, closed range.

    items:  of a tuple whose items have ranges of their own; `doc` is then the item's name
    """

    doc: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None  # an open lower bound
    items: tuple["Knob", ...] = ()

    def problems(self, path: str, value: Any) -> list[str]:
        """Return what is wrong with `value`: key, value, bound; nothing when it is within bounds."""
        if self.items:
            named = zip(self.items, value, strict=True)
            return [
                problem
                for index, (knob, item) in enumerate(named)
                for problem in knob.problems(f"{path}[{index}] ({knob.doc})", item)
            ]
        problem = self._problem(value)
        return [f"{path} = {value!r}: {problem}"] if problem else []

    def _problem(self, value: Any) -> str | None:
        numbers = value if isinstance(value, list | tuple) else (value,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not math.isfinite(number):
                return f"must be finite and {self.bound}" if self.bound else "must be finite"
            if (
                (self.low is not None and number < self.low)
                or (self.high is not None and number > self.high)
                or (self.above is not None and number <= self.above)
            ):
                return f"must be {self.bound}"
        return None

    @property
    def bound(self) -> str:
        """Return the range in words."""
        if self.above is not None:
            return f"> {self.above:g}" + (f" and <= {self.high:g}" if self.high is not None else "")
        if self.low is not None and self.high is not None:
            return f"in [{self.low:g}, {self.high:g}]"
        if self.low is not None:
            return f">= {self.low:g}"
        return f"<= {self.high:g}" if self.high is not None else ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section: bounds and rules hold however the object came to be.

    PATH:    where the section stands in a graph's configuration, for messages

    Raises:  ConfigError listing every key that is out of bounds and every rule that is broken.
    """

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        known = knobs(type(self))
        values = {name: getattr(self, name) for name in known}
        found = {name: known[name][1].problems(f"{self.PATH}.{name}", values[name]) for name in known}
        good = {name: value for name, value in values.items() if not found[name]}
        problems = [problem for name in known for problem in found[name]]
        problems += self.broken_rules(good, self.PATH)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield what breaks a rule that no single key's bound can say: key, value, rule.

        Args:     good: the keys that are within their bounds; a rule about another one is not judged.
        """
        yield from ()


class CommonConfig(Section, frozen=True, kw_only=True):
    """What all processes of a graph share."""

    PATH: ClassVar[str] = "Common"

    namespace: Annotated[
        str, Knob("Dynamo namespace the frontend sees; workers live in `<namespace>-workers`")
    ] = "poa"
    model_path: Annotated[str, Knob("model directory; `mock` generates the mock model's")] = "mock"
    model_name: Annotated[str, Knob("name the model is served under")] = "mock-llama-3.1-70b"
    block_size: Annotated[int, Knob("KV block size of router and workers", "tokens", low=1, high=4096)] = 16
    nats_url: Annotated[str, Knob("`embedded`, or the URL of an existing server")] = "embedded"
    discovery: Annotated[str, Knob("`file` (temporary folder), `etcd://host:port` or `kubernetes`")] = "file"
    handover: Annotated[
        Literal["auto", "bootstrap", "sequential"],
        Knob("how the KV cache goes from prefill to decode; `auto` reads it from the prefill worker's card"),
    ] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Knob("of our own processes")] = "info"

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield whether the namespace is none."""
        namespace = good.get("namespace")
        if namespace is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", namespace):
            must = "must be letters, digits, - and _ (it is one token of a subject)"
            yield f"{path}.namespace = {namespace!r}: {must}"

    @property
    def worker_namespace(self) -> str:
        """Return the namespace the real workers live in, out of the frontend's sight."""
        return f"{self.namespace}-workers"

    def worker_endpoint(self, role: Role) -> str:
        """Return the Dynamo endpoint path of a pool's workers. Source: the engines' own defaults."""
        return f"{self.worker_namespace}.{'prefill' if role is Role.PREFILL else 'backend'}.generate"

    def router_endpoint(self, role: Role) -> str:
        """Return the path at which the plugin serves a leg to the frontend."""
        return f"{self.namespace}.{'prefill' if role is Role.PREFILL else 'backend'}.generate"


class FrontendConfig(Section, frozen=True, kw_only=True):
    """Dynamo's own HTTP frontend, unmodified."""

    PATH: ClassVar[str] = "Frontend"

    http_host: Annotated[str, Knob("address to listen on")] = "127.0.0.1"
    http_port: Annotated[int, Knob("0 picks a free one", low=0, high=65535)] = 8000
    args: Annotated[dict[str, Any], Knob("further `dynamo.frontend` flags, without the dashes")] = {}


class WorkerConfig(Section, frozen=True, kw_only=True):
    """One pool of workers: `PrefillWorker`, `DecodeWorker` or `Worker` (aggregated)."""

    PATH: ClassVar[str] = "Worker"

    engine: Annotated[
        Literal["mocker", "vllm", "sglang", "trtllm"], Knob("runs `python -m dynamo.<engine>`")
    ] = "mocker"
    workers: Annotated[int, Knob("how many workers", low=1, high=1024)] = 1
    per_process: Annotated[int, Knob("mock workers in one process; real engines take 1", low=1, high=64)] = 1
    gpus: Annotated[
        tuple[int, ...],
        Knob("GPUs to share out evenly, in order; empty leaves CUDA_VISIBLE_DEVICES alone", low=0),
    ] = ()
    args: Annotated[dict[str, Any], Knob("engine flags, without the dashes")] = {}
    args_of: Annotated[
        dict[int, dict[str, Any]],
        Knob("further flags of single workers, by number from 0; each then has a process of its own"),
    ] = {}
    env: Annotated[dict[str, str], Knob("environment of the engine's processes")] = {}

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield the workers that `args_of` speaks of and that the pool does not have."""
        workers, args_of = good.get("workers"), good.get("args_of")
        if workers is not None and args_of is not None:
            for number, args in args_of.items():
                if not 0 <= number < workers:
                    yield (
                        f"{path}.args_of.{number} = {args!r}: must be the number of a worker, "
                        f"in [0, {path}.workers - 1 = {workers - 1}]"
                    )


class RouterConfig(Section, frozen=True, kw_only=True):
    """The router plugin: `PoaRouter`."""

    PATH: ClassVar[str] = "PoaRouter"

    legs: Annotated[
        tuple[Literal["prefill", "decode", "aggregated"], ...],
        Knob(
            "which legs go through the plugin; `[prefill]` alone costs nothing per token and needs sequential hand-over"
        ),
    ] = ("prefill", "decode")
    data_path: Annotated[
        Literal["auto", "relay", "stream"],
        Knob(
            "`relay` forwards a request's frame and copies the answer's bytes unread; `stream` passes every token through Dynamo's Python API; `auto` is the relay where Dynamo's release is a tested one and discovery can be rewritten (`file`, etcd), else `stream`, and says why"
        ),
    ] = "auto"
    replicas: Annotated[int, Knob("router processes", low=1, high=64)] = 1
    min_prefill_workers: Annotated[int, Knob("registers only when so many are there", low=1, high=1024)] = 1
    min_decode_workers: Annotated[
        int, Knob("the same for decode or aggregated workers", low=1, high=1024)
    ] = 1
    router_temperature: Annotated[
        float,
        Knob(
            "static τ: before the first parameters, and after the lease [dynamo]",
            low=0,
            high=MAX_ROUTER_TEMPERATURE,
        ),
    ] = 0.0
    overlap_weight: Annotated[float, Knob("static ω, likewise [dynamo]", low=0, high=MAX_OVERLAP_WEIGHT)] = (
        1.0
    )
    overlap_key: Annotated[
        Literal["overlap_score_credit", "prefill_load_scale"], Knob("which Dynamo override ω becomes")
    ] = "overlap_score_credit"
    replica_sync: Annotated[bool, Knob("Dynamo's own synchronisation of router replicas")] = False
    policy_config: Annotated[
        str,
        Knob(
            "Dynamo's router policy file: when requests wait in its router, and how many before it refuses more; empty: never [dynamo]"
        ),
    ] = ""
    candidates_per_s: Annotated[
        float,
        Knob(
            "decisions a second and leg that are recorded with every worker's load and cache, which misses and the paper's PoA-hat are computed from; it adds to a request's cost; 0 records none",
            low=0,
            high=100_000,
        ),
    ] = 50.0
    batch_s: Annotated[float, Knob("decisions are sent at least so often", "s", above=0, high=10)] = 0.05
    batch_size: Annotated[int, Knob("or when so many are waiting", low=1, high=4096)] = 64
    queue_size: Annotated[
        int,
        Knob("decision events held while NATS is away; more are dropped and counted", low=64, high=1_000_000),
    ] = 16384
    drain_s: Annotated[float, Knob("SIGTERM waits so long for running requests", "s", low=0, high=600)] = 5.0
    avoid_s: Annotated[
        float,
        Knob(
            "a worker that refused a connection is avoided for so long, or until discovery drops it",
            "s",
            low=0,
            high=600,
        ),
    ] = 15.0
    metrics_port: Annotated[
        int, Knob("/metrics and /health on loopback; 0 picks a free one", low=0, high=65535)
    ] = 0

    @property
    def exposes_decode(self) -> bool:
        """Tell whether decode workers stand in the frontend's own namespace, since no router of ours does."""
        return self.legs == ("prefill",)

    @property
    def hears_replicas(self) -> bool:
        """Tell whether Dynamo's routers book what replicas tell: by configuration, or ours being the only one.

        Pinned requests are told them that way, and one router has nobody else to hear.
        """
        return self.replica_sync or self.replicas == 1


class RegimeConfig(Section, frozen=True, kw_only=True):
    """When the load regime changes: `PoaController.regime`."""

    PATH: ClassVar[str] = "PoaController.regime"

    theta1: Annotated[
        float, Knob("TTFT P99 that ends `below`: a multiple of the baseline, or seconds", above=0, high=1e6)
    ] = 2.5
    theta2: Annotated[float, Knob("TTFT P99 that begins `saturated`, likewise", above=0, high=1e6)] = 8.0
    unit: Annotated[
        Literal["baseline", "seconds"],
        Knob("what θ1 and θ2 count [paper: multiples of the model's own baseline]"),
    ] = "baseline"
    exit_frac: Annotated[
        float, Knob("a regime is left downwards below this share of its threshold", low=0.1, high=1)
    ] = 0.7
    half_life_s: Annotated[float, Knob("of the moving average of TTFT P99", "s", above=0, high=600)] = 1.0
    confirm_s: Annotated[
        float,
        Knob(
            "upwards the signal must stay over its threshold for so long; longer than window_s, in which one hiccup stays",
            "s",
            low=0,
            high=600,
        ),
    ] = 4.0
    dwell_s: Annotated[
        float,
        Knob(
            "least time between two changes; longer than window_s, so that each is judged on requests routed under the last",
            "s",
            low=0,
            high=3600,
        ),
    ] = 5.0
    min_samples: Annotated[
        int, Knob("fewer TTFT samples in the window are no signal", low=1, high=100_000)
    ] = 20
    window_s: Annotated[float, Knob("TTFT window", "s", above=0, high=600)] = 3.0
    idle_s: Annotated[
        float, Knob("without a request for so long the system counts as idle", "s", above=0, high=3600)
    ] = 5.0
    release_frac: Annotated[
        float,
        Knob(
            "stepping down asks for requests in flight (arrivals if unknown) under this share of those it was needed at",
            low=0.05,
            high=1,
        ),
    ] = 0.75
    probe_s: Annotated[
        float,
        Knob("or that it was not needed for so long; doubled after each relapse", "s", above=0, high=86_400),
    ] = 300.0
    queue_saturated: Annotated[
        float,
        Knob(
            "work queued in a pool's engines that begins `saturated`; one unit is the effective service time of a request over the pool's workers [theory: M/G/1; measured: bench `detection`]",
            "units",
            low=1,
            high=1000,
        ),
    ] = 28.0
    queue_transition: Annotated[
        float,
        Knob(
            "moving average of it that begins `transition`: what queues at about 95 % of capacity [measured]",
            "units",
            low=0.5,
            high=1000,
        ),
    ] = 5.0
    queue_half_life_s: Annotated[float, Knob("of that moving average", "s", above=0, high=600)] = 7.0
    kv_frac: Annotated[
        float, Knob("share of a pool's KV blocks in use that is near full", low=0.1, high=1)
    ] = 0.9
    slots_frac: Annotated[
        float, Knob("share of a pool's `max_num_seqs` that is full when requests wait", low=0.1, high=1)
    ] = 0.95
    iteration_factor: Annotated[
        float,
        Knob("decode iteration time over its unloaded value that begins `transition`", above=1, high=1000),
    ] = 4.0
    pool_confirm_s: Annotated[
        float, Knob("a queue must stay over its threshold for so long: two ticks", "s", low=0, high=600)
    ] = 0.25
    pool_release_s: Annotated[
        float, Knob("a pool's resources must rest for so long before it is released", "s", low=0, high=600)
    ] = 3.0
    baseline_s: Annotated[
        float | None, Knob("a fixed baseline TTFT P99 instead of a learned one", "s", above=0, high=3600)
    ] = None

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield whether the thresholds are out of order."""
        for low, high in (("theta1", "theta2"), ("queue_transition", "queue_saturated")):
            lower, higher = good.get(low), good.get(high)
            if lower is not None and higher is not None and higher <= lower:
                yield f"{path}.{high} = {higher:g}: must be > {path}.{low} = {lower:g}"


_PAIR = Knob(
    "[paper]",
    low=0,
    high=MAX_ROUTER_TEMPERATURE,
    items=(Knob("τ", low=0, high=MAX_ROUTER_TEMPERATURE), Knob("ω", low=0, high=MAX_OVERLAP_WEIGHT)),
)


PolicyName = Literal["static", "table", "auto", "marginal"]


class PolicyConfig(Section, frozen=True, kw_only=True):
    """What decides the parameters: `PoaController.policy`. Pairs are [τ, ω]."""

    PATH: ClassVar[str] = "PoaController.policy"

    name: Annotated[
        PolicyName,
        Knob(
            "`static` never moves; `table` is the paper's; `auto` tries changes and keeps those that help; `marginal` lets the plugin pick each request's worker by what it costs all"
        ),
    ] = "table"
    shadow: Annotated[
        Literal["", PolicyName], Knob("a second policy that is asked beside it and only recorded")
    ] = ""
    cooldown_s: Annotated[
        float,
        Knob(
            "a policy that fails is not asked for so long; its last good parameters are kept",
            "s",
            low=1,
            high=86_400,
        ),
    ] = 60.0
    below: Annotated[tuple[float, float], _PAIR] = (0.0, 1.0)
    transition: Annotated[tuple[float, float], _PAIR] = (0.7, 1.0)
    saturated: Annotated[tuple[float, float], _PAIR] = (0.8, 0.1)
    auto_start: Annotated[
        Literal["static", "table"],
        Knob("what `auto` begins with and goes back to: static, or the table's pairs"),
    ] = "static"
    slot_s: Annotated[
        float, Knob("`auto` compares two settings in turns of so long", "s", low=0.5, high=600)
    ] = 4.0
    settle_s: Annotated[
        float,
        Knob(
            "requests so early in a turn still meet the queues of the one before and do not count",
            "s",
            low=0,
            high=300,
        ),
    ] = 1.0
    max_pairs: Annotated[
        int, Knob("pairs of turns after which a trial that shows nothing ends", low=4, high=64)
    ] = 8
    min_requests: Annotated[
        int, Knob("a turn with fewer requests that ended says nothing", low=4, high=100_000)
    ] = 20
    rest_s: Annotated[
        float, Knob("between two trials, or two returns to a remembered setting", "s", low=0, high=86_400)
    ] = 10.0
    memory_half_life_s: Annotated[
        float,
        Knob(
            "what a trial showed counts half after so long, and is forgotten after twice that",
            "s",
            low=10,
            high=1e6,
        ),
    ] = 600.0
    prior_margin_frac: Annotated[
        float,
        Knob(
            "a setting that the calibrated model predicts to cost so much more is not tried", low=0, high=10
        ),
    ] = 0.1

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield that nothing of a turn would count."""
        slot_s, settle_s = good.get("slot_s"), good.get("settle_s")
        if slot_s is not None and settle_s is not None and settle_s >= slot_s:
            yield f"{path}.settle_s = {settle_s!r}: must be below {path}.slot_s = {slot_s!r}"


class SloConfig(Section, frozen=True, kw_only=True):
    """What users are promised: `PoaController.slo`. The split of workers is judged by it."""

    PATH: ClassVar[str] = "PoaController.slo"

    ttft_s: Annotated[float, Knob("time to first token", "s", above=0, high=3600)] = 2.0
    itl_s: Annotated[float, Knob("time between tokens, of a request's mean", "s", above=0, high=60)] = 0.05


class CachingConfig(Section, frozen=True, kw_only=True):
    """What the caching game is played for: `PoaController.caching`."""

    PATH: ClassVar[str] = "PoaController.caching"

    topology: Annotated[
        Literal["host", "one", "each"],
        Knob(
            "which workers share a node: those whose requests go to one `host`, all (`one`), or none (`each`)"
        ),
    ] = "host"
    transfer: Annotated[
        Literal["none", "node", "all"],
        Knob(
            "from where a worker could fetch a prefix that it lacks: nowhere (it recomputes, as Dynamo's workers without a shared KV store do), from its node, from anywhere"
        ),
    ] = "all"
    transfer_node_token_s: Annotated[
        float,
        Knob(
            "time to fetch a token's KV cache within a node [320 KB a token of a 70B model, 450 GB/s NVLink]",
            "s",
            low=0,
            high=1,
        ),
    ] = 0.7e-6
    transfer_far_token_s: Annotated[
        float,
        Knob("the same between nodes [50 GB/s InfiniBand]", "s", low=0, high=1),
    ] = 6.5e-6
    demand_window_s: Annotated[
        float, Knob("request rates of prefix groups are those of so long", "s", low=5, high=3600)
    ] = 60.0
    max_groups: Annotated[
        int, Knob("prefix groups that are priced; of more the rarest are left out", low=2, high=10_000)
    ] = 200
    reload_s: Annotated[
        float,
        Knob(
            "a block stored again so soon after its eviction was evicted too early", "s", above=0, high=3600
        ),
    ] = 30.0


class ControllerConfig(Section, frozen=True, kw_only=True):
    """The controller: `PoaController`."""

    PATH: ClassVar[str] = "PoaController"

    mode: Annotated[
        Mode, Knob("`off` keeps static parameters, `shadow` decides without applying, `active` applies")
    ] = Mode.ACTIVE
    tick_s: Annotated[float, Knob("control period", "s", low=0.05, high=60)] = 0.25
    heartbeat_s: Annotated[
        float, Knob("the current parameters are repeated so often", "s", low=0.1, high=60)
    ] = 1.0
    lease_s: Annotated[
        float,
        Knob(
            "routers fall back to static parameters after so long without a heartbeat", "s", low=1, high=3600
        ),
    ] = 30.0
    stale_s: Annotated[
        float, Knob("a silent worker or publisher counts as stale after so long", "s", low=1, high=3600)
    ] = 30.0
    estimate_s: Annotated[
        float,
        Knob("a snapshot of the requests in flight is taken and priced so often", "s", low=0.05, high=60),
    ] = 1.0
    estimate_window_s: Annotated[
        float, Knob("PoA-hat is that of the snapshots of so long", "s", low=10, high=3600)
    ] = 60.0
    games_s: Annotated[
        float,
        Knob(
            "cache placement and the split of workers are priced so often; advice takes six looks in a minute",
            "s",
            low=0.5,
            high=10,
        ),
    ] = 5.0
    window: Annotated[
        int, Knob("decisions the paper's own PoA-hat (`frozen`) is computed over", low=16, high=4096)
    ] = 256
    latency_half_life_s: Annotated[
        float, Knob("a forward pass counts half in a latency model after so long", "s", low=1, high=3600)
    ] = 60.0
    straggler_factor: Annotated[
        float, Knob("a worker so many times slower than its pool's median is a straggler", above=1, high=100)
    ] = 2.0
    scrape_s: Annotated[float, Knob("the frontend's histogram is read so often", "s", low=0.1, high=60)] = 0.5
    frontend_url: Annotated[
        str, Knob("frontend whose /metrics is read; empty takes TTFT from decisions alone")
    ] = ""
    metrics_port: Annotated[
        int, Knob("/metrics and /health on loopback; 0 picks a free one", low=0, high=65535)
    ] = 0
    regime: Annotated[RegimeConfig, Knob("when the load regime changes")] = msgspec.field(
        default_factory=RegimeConfig
    )
    policy: Annotated[PolicyConfig, Knob("which parameters belong to which regime")] = msgspec.field(
        default_factory=PolicyConfig
    )
    slo: Annotated[SloConfig, Knob("what users are promised")] = msgspec.field(default_factory=SloConfig)
    caching: Annotated[CachingConfig, Knob("the caching game")] = msgspec.field(default_factory=CachingConfig)

    @classmethod
    def broken_rules(cls, good: Mapping[str, Any], path: str) -> Iterator[str]:
        """Yield whether a single missed heartbeat could end the lease."""
        heartbeat_s, lease_s = good.get("heartbeat_s"), good.get("lease_s")
        if heartbeat_s is not None and lease_s is not None and heartbeat_s * 2 > lease_s:
            yield f"{path}.lease_s = {lease_s:g}: must be >= 2 x heartbeat_s = {2 * heartbeat_s:g}"


def knobs(section: type[Section]) -> dict[str, tuple[Any, Knob]]:
    """Return each key's bare type and its Knob, in declaration order."""
    result = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        if get_origin(hint) is Annotated:
            bare, knob = get_args(hint)[:2]
            result[name] = (bare, knob)
    return result


def read_section(section: type[T], raw: Any, path: str) -> tuple[T | None, list[str]]:
    """Read one section from a mapping, collecting every problem rather than the first.

    Args:     raw: as YAML or JSON gave it; None counts as empty.  path: shown in messages.
    Returns:  the section and no problems, or None and at least one message naming key, value and bound.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        return None, [f"{path} = {raw!r}: must be a mapping of keys to values"]
    known = knobs(section)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"
            problems.append(f"{path}.{key} = {value!r}: unknown key{hint}")
            continue
        bare, knob = known[key]
        if isinstance(bare, type) and issubclass(bare, Section):
            inner, inner_problems = read_section(bare, value, f"{path}.{key}")
            problems += inner_problems
            if inner is not None:
                values[key] = inner
            continue
        try:
            converted = msgspec.convert(value, bare, str_keys=True)  # a number as a key is text in JSON
        except msgspec.ValidationError as error:
            problems.append(f"{path}.{key} = {value!r}: {_type_problem(error, bare)}")
            continue
        if found := knob.problems(f"{path}.{key}", value):  # as it was written, 3 and not 3.0
            problems += found
        else:
            values[key] = converted
    defaults = section()
    missing = {key: getattr(defaults, key) for key in known if key not in raw}
    problems += section.broken_rules(missing | values, path)
    return (None, problems) if problems else (section(**values), [])


def _type_problem(error: msgspec.ValidationError, bare: Any) -> str:
    if get_origin(bare) is Literal:
        return "must be one of " + ", ".join(map(str, get_args(bare)))
    if isinstance(bare, type) and issubclass(bare, Mode):
        return "must be one of " + ", ".join(Mode)
    return str(error)[0].lower() + str(error)[1:]


def load_sections(path: Path, wanted: dict[str, type[Section]]) -> dict[str, Any]:
    """Read some sections of a YAML or JSON file; a section that is missing has its defaults.

    Raises:  ConfigError listing every problem of every wanted section.
    """
    try:
        raw = load_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: must be a mapping of sections"])
    problems: list[str] = []
    sections: dict[str, Any] = {}
    for name, section in wanted.items():
        sections[name], found = read_section(section, raw.get(name), name)
        problems += found
    if problems:
        raise ConfigError(problems)
    return sections
