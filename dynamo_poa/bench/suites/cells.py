"""What a suite consists of: cells, each one policy on one fleet under one workload, and what each found.

Owns: the values that suites, engines, store, statistics and reports exchange; a cell's id; that no figure is
      NaN.
Does not own: which cells a suite has (catalogue.py), how one is run (replayed.py, live.py).
Invariant: cells that differ in nothing but their policy are paired: same fleet, workload, load and seed. A
           result's figures are finite numbers in seconds, requests and shares; what was not measured is
           absent.
"""

import hashlib
import math
from typing import Literal

import msgspec

from dynamo_poa.bench.report import Machine
from dynamo_poa.config import SloConfig
from dynamo_poa.errors import PoaError
from dynamo_poa.workloads.arrivals import Load
from dynamo_poa.workloads.synthetic import Content

RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded"]
PluginMode = Literal["", "off", "shadow", "active"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are routed.

    plugin:  empty for Dynamo's own frontend and router; else our router and controller, in this mode
    table:   the controller's policy where `plugin` is `active`: `table` is the paper's
    """

    name: str
    router_mode: RouterMode = "kv"
    router_temperature: float = 0.0
    overlap_credit: float = 1.0
    prefill_load_scale: float = 1.0
    credit_decay: float = 0.0
    plugin: PluginMode = ""
    table: str = "table"


_ANY = Policy(name="")


class SlowWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that takes `factor` times as long."""

    role: Literal["aggregated", "prefill", "decode"]
    number: int
    factor: float


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that stands still for `stall_s` in every `period_s`."""

    role: Literal["aggregated", "prefill", "decode"]
    number: int
    stall_s: float
    period_s: float


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The workers and what stands before them.

    prefill, decode:  workers; `prefill` = 0: `decode` aggregated ones
    prefill_at_once:  prompts that a prefill worker takes at a time; 0: as many as `max_num_seqs`
    speedup:          of the mock engine over the GPU it simulates
    profile:          name of a timing profile (profiles/), empty for the engine's own timing
    host_blocks:      KV blocks of the host tier; 0 for none
    routers:          router processes (frontends, where there is no plugin)
    """

    name: str
    prefill: int
    decode: int
    block_tokens: int = 16
    kv_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    speedup: float = 1.0
    profile: str = ""
    host_blocks: int = 0
    slow: tuple[SlowWorker, ...] = ()
    stall: Stall | None = None
    routers: int = 1
    replica_sync: bool = False
    prefill_at_once: int = 0

    @property
    def topology(self) -> str:
        """Return `2P/4D`, or `6A` of aggregated workers."""
        return f"{self.prefill}P/{self.decode}D" if self.prefill else f"{self.decode}A"


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a cell with a load of its own."""

    name: str
    load: Load
    seconds: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    requests:  how many, in replay
    learn_s:   of its live load before its warm-up, where its graph has not been through a cell yet: policies
               that adapt learn in it, and all others have it too
    warm_up_s, seconds:  of live load before and while it is measured; of a closed loop or an open one
    phases:    instead of `load` and `seconds`, where the load changes while it is measured (live)
    slo:       objectives that requests are counted by (replay)
    """

    suite: str
    engine: Literal["replay", "live"]
    fleet: Fleet
    content: Content
    load: Load
    policy: Policy
    seed: int
    requests: int = 0
    learn_s: float = 0.0
    warm_up_s: float = 0.0
    seconds: float = 0.0
    phases: tuple[Phase, ...] = ()
    slo: SloConfig | None = None

    @property
    def id(self) -> str:
        """Return the same few letters for the same cell, now, after a restart and in later versions."""
        as_read = msgspec.json.decode(
            msgspec.json.encode(self), type=Cell
        )  # 1 is then 1.0 where a float is due
        fields = msgspec.to_builtins(as_read)
        for of, name in ((fields, "slo"), (fields["fleet"], "prefill_at_once")):  # not there from the start
            if not of[name]:
                del of[name]
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]

    @property
    def pair(self) -> str:
        """Return what cells to be paired have in common: an id of all but the policy."""
        return msgspec.structs.replace(self, policy=_ANY).id

    @property
    def question(self) -> str:
        """Return an id of what is asked of a policy, over all seeds: of all but policy and seed."""
        return msgspec.structs.replace(self, policy=_ANY, seed=0).id

    @property
    def group(self) -> str:
        """Return what cells to be paired have in common, but for the seed, in words."""
        return f"{self.fleet.name} | {self.content.name} | {self.load.text}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A cell at one instant: the controller's own record, for what changes over time."""

    at_s: float
    phase: str = ""
    regime: str = ""
    poa_hat: float | None = None
    poa_caching: float | None = None
    duplication: float | None = None
    ttft_p99_s: float | None = None
    router_temperature: float | None = None
    overlap_weight: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell found.

    state:    `void`: the processors were what limited; `failed`: there are no figures; each with a reason
    figures:  ttft_mean_s, ttft_p50_s, ttft_p99_s, itl_mean_s, itl_p50_s, itl_p99_s, e2e_mean_s, e2e_p50_s,
              e2e_p99_s, throughput_rps, output_tokens_per_s, cached_frac, requests, failed; where known
              poa_hat, poa_low, poa_high, poa_frozen, poa_caching, caching_observed_s, caching_optimal_s,
              duplication, hit_frac, all of telemetry; in phases the same with `<phase>.` before them
    picks:    requests by worker, such as `prefill-0`
    health:   of the bench itself: busy_frac, own_frac, client_frac, send_lag_p99_s, `cpu.<process>` (cores),
              loaded_s: how long the graph had been under load when the measurement began
    """

    cell: Cell
    state: Literal["done", "void", "failed"]
    reason: str = ""
    figures: dict[str, float] = {}
    picks: dict[str, int] = {}
    health: dict[str, float] = {}
    series: tuple[Point, ...] = ()
    wall_s: float = 0.0
    at: str = ""  # when it ended, ISO 8601, UTC

    def __post_init__(self) -> None:
        """Refuse what is no number.

        Raises:  NotANumber.
        """
        points = ((f"series[{n}]", msgspec.structs.asdict(point)) for n, point in enumerate(self.series))
        own = ("result", {"wall_s": self.wall_s})
        for where, values in (("figures", self.figures), ("health", self.health), own, *points):
            for key, value in values.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise NotANumber(f"{self.cell.id} {where}.{key} = {value}: must be finite")


class NotANumber(PoaError):
    """A measurement came out as NaN or infinity: an error, not a result."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of results opens with.

    only:  words that chose some of the suite's cells; empty: all of them
    cells: that were asked for
    """

    suite: str
    machine: Machine
    command: str
    seeds: tuple[int, ...]
    cells: int
    started_at: str
    only: tuple[str, ...] = ()
