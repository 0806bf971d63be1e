"""The values everyone speaks.

Owns: frozen records that cross module borders: parameters, decisions, what a tick sees and what it decides.
Does not own: their encoding (wire.py) or any rule about them beyond their own validity.
Invariant: a `RouterParams` that exists is valid; construction refuses anything else.
Source: Contracts of the architecture; worker ids are unsigned 64-bit and never pass through a float.
"""

import math
import re
from enum import StrEnum
from typing import NamedTuple

import msgspec

from dynamo_poa.errors import ParamsError

# Dynamo accepts an infinite temperature; above this the choice is uniform to the last digit anyway,
# and a number a person can read says more. Source: measured, host: KvRouter override.
MAX_ROUTER_TEMPERATURE = 100.0
MAX_REVISION = 2**53 - 1  # exact in JSON, also for readers that hold numbers as doubles
MAX_OVERLAP_WEIGHT = 2.0  # contract: values above 1 give a cached block extra credit; 2 is the paper's range
KV_LIMIT_FRAC = 1.05  # u_max of the paper's eq. 9, above 1 so that a full cache is slow and not infinitely so
KV_PRESSURE_FRAC = 0.8  # below this use of the KV cache nothing of the singular term shows
MAX_PREFILL_LOAD_SCALE = 16.0  # contract: beyond it the load term alone decides, by any measured prompt


class Role(StrEnum):
    """Which leg of a request a worker or a decision belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Regime(StrEnum):
    """The three load regimes of the paper, section 5."""

    BELOW = "below"
    TRANSITION = "transition"
    SATURATED = "saturated"

    @property
    def level(self) -> int:
        """Return 0 below, 1 in transition, 2 saturated."""
        return REGIMES.index(self)


REGIMES = (Regime.BELOW, Regime.TRANSITION, Regime.SATURATED)


class Mode(StrEnum):
    """How far the controller may go: nothing, decide without applying, apply."""

    OFF = "off"
    SHADOW = "shadow"
    ACTIVE = "active"


class Selection(StrEnum):
    """Who picks the worker of a request."""

    KV = "kv"  # Dynamo's own selection, under τ, ω and the prefill load scale
    MARGINAL = "marginal"  # the router plugin, by marginal social cost


class Setting(msgspec.Struct, frozen=True):
    """How requests are routed: everything a policy decides, changed together or not at all.

    prefill_load_scale:  weight of prompt tokens booked and not yet prefilled; None leaves it Dynamo's own
    selection:           under `marginal` the others are what a request falls back to
    """

    router_temperature: float
    overlap_weight: float
    prefill_load_scale: float | None = None
    selection: Selection = Selection.KV

    def __str__(self) -> str:
        """Return it as a person reads it; what is Dynamo's own is left out."""
        scale = "" if self.prefill_load_scale is None else f" scale {self.prefill_load_scale:g}"
        marginal = " marginal" if self.selection is Selection.MARGINAL else ""
        return f"τ {self.router_temperature:g} ω {self.overlap_weight:g}{scale}{marginal}"


class ParamsKind(StrEnum):
    """Who set the parameters."""

    STATIC = "static"  # the configured defaults
    POLICY = "policy"  # the controller's policy
    PIN = "pin"  # an operator, through `dynamo-poa set`
    EXTERNAL = "external"  # an operator, by writing the key-value entry


class Outcome(StrEnum):
    """How a request ended, as the router saw it."""

    OK = "ok"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SHED = "shed"


class Applied(StrEnum):
    """What became of a tick's wish to change parameters."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    HELD_NOT_READY = "held_not_ready"
    HELD_STALE = "held_stale"
    HELD_DWELL = "held_dwell"
    HELD_PIN = "held_pin"
    HELD_MODE = "held_mode"
    APPLY_FAILED = "apply_failed"


class CacheSignal(StrEnum):
    """Whether workers differ in what they hold of a prompt: without that, ω moves nothing."""

    UNKNOWN = "unknown"
    PRESENT = "present"
    ABSENT = "absent"


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """What decisions show of the prefix caches.

    hit_frac:  share of prompt tokens that the chosen workers held; None while no cache has shown itself
    """

    signal: CacheSignal = CacheSignal.UNKNOWN
    hit_frac: float | None = None


class WorkerKey(NamedTuple):
    """A worker is its id and its data-parallel rank: each rank has its own queue and cache."""

    worker_id: int
    dp_rank: int


class Booked(NamedTuple):
    """A request counted as a worker's load; `cached_tokens` of its prompt are in that worker's cache."""

    worker: WorkerKey
    cached_tokens: int


_ADDRESS = re.compile(
    r"(?:\[([0-9a-fA-F:.]+)\]|([0-9a-fA-F:.]+)|([^:/\[\]]+))"  # IPv6, with brackets or without, or a name
    r":([0-9]{1,5})/([0-9a-fA-F]{1,16}/.+)"
)


class Address(NamedTuple):
    """Where an instance takes requests; discovery writes `host:port/<instance id in hex>/<endpoint>`."""

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read discovery's form.

        Raises:  ValueError for anything else.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None or not 0 < int(found[4]) < 65536:
            raise ValueError(f"{text!r}: must be host:port/<hex id>/<endpoint>")
        return cls(found[1] or found[2] or found[3], int(found[4]), found[5])

    @property
    def worker_id(self) -> int:
        """Return the instance's id."""
        return int(self.path.partition("/")[0], 16)

    def __str__(self) -> str:
        """Return discovery's form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.path}"


class RouterParams(msgspec.Struct, frozen=True, kw_only=True):
    """The Smart Router's parameters at one revision; all values change together or not at all.

    revision:            monotonic, set by the controller
    router_temperature:  τ, in [0, MAX_ROUTER_TEMPERATURE]; 0 is greedy
    overlap_weight:      ω, in [0, MAX_OVERLAP_WEIGHT]; weight of cache overlap
    issued_at_s:         seconds since the epoch
    baseline_s:          TTFT P99 the regime was judged against, so that a restarted controller judges alike;
                         above 0, None while it is not known
    iteration_baseline_s:  decode iteration without load, likewise
    lease_s:             a router that hears nothing for this long falls back to its static parameters
    prefill_load_scale:  in [0, MAX_PREFILL_LOAD_SCALE], None leaves it Dynamo's own
    selection:           who picks the worker

    Raises:  ParamsError, naming the key, the value and the bound.
    """

    revision: int
    router_temperature: float
    overlap_weight: float
    kind: ParamsKind = ParamsKind.STATIC
    reason: str = ""
    regime: Regime = Regime.BELOW
    issued_at_s: float = 0.0
    lease_s: float = 30.0
    baseline_s: float | None = None
    iteration_baseline_s: float | None = None
    prefill_load_scale: float | None = None
    selection: Selection = Selection.KV

    def __post_init__(self) -> None:
        _require_number("router_temperature", self.router_temperature, MAX_ROUTER_TEMPERATURE)
        _require_number("overlap_weight", self.overlap_weight, MAX_OVERLAP_WEIGHT)
        _require_number("lease_s", self.lease_s, 3600.0)
        _require_number("issued_at_s", self.issued_at_s, 1e11)
        for key in ("baseline_s", "iteration_baseline_s"):
            if getattr(self, key) is not None:
                _require_number(key, getattr(self, key), 86_400.0, above_zero=True)
        if self.prefill_load_scale is not None:
            _require_number("prefill_load_scale", self.prefill_load_scale, MAX_PREFILL_LOAD_SCALE)
        if not isinstance(self.selection, Selection):
            raise ParamsError("type", "selection", self.selection, "one of " + ", ".join(Selection))
        bound = f"a whole number in [0, {MAX_REVISION}]"
        if isinstance(self.revision, bool) or not isinstance(self.revision, int):
            raise ParamsError("type", "revision", self.revision, bound)
        if not 0 <= self.revision <= MAX_REVISION:
            raise ParamsError("out_of_range", "revision", self.revision, bound)

    def same_values(self, other: "RouterParams") -> bool:
        """Tell whether both would route alike, whatever their revisions."""
        return self.setting == other.setting

    @property
    def setting(self) -> Setting:
        """Return how it says to route."""
        return Setting(self.router_temperature, self.overlap_weight, self.prefill_load_scale, self.selection)


def _require_number(key: str, value: object, high: float, *, above_zero: bool = False) -> None:
    bound = f"a finite number in {'(' if above_zero else '['}0, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParamsError("type", key, value, bound)
    if isinstance(value, float) and not math.isfinite(value):
        raise ParamsError("not_finite", key, value, bound)
    if not 0 <= value <= high or (above_zero and value == 0):
        raise ParamsError("out_of_range", key, value, bound)


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One worker as Dynamo's own router saw it when it chose, before this request was added.

    uncached_tokens:        prompt tokens of this request that the worker would have to compute
    queued_prefill_tokens:  uncached prompt tokens booked there and not yet prefilled
    decode_blocks:          KV blocks of the requests booked there
    added_blocks:           KV blocks this request would add there, beyond what it shares with running ones
    """

    worker_id: int
    dp_rank: int
    uncached_tokens: int
    queued_prefill_tokens: int
    decode_blocks: int
    active_requests: int
    added_blocks: int = 0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One routing decision, as far as it is known now.

    Instants are seconds since the epoch on the router's clock; None means "not yet".
    `candidates` is empty when the router did not record them.
    """

    request_id: str
    role: Role
    decided_at_s: float
    worker: WorkerKey
    prompt_tokens: int
    revision: int
    candidates: tuple[Candidate, ...] = ()
    received_at_s: float | None = None
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    outcome: Outcome | None = None
    attempts: int = 1

    @property
    def ttft_s(self) -> float | None:
        """Return receipt to first token in seconds, None before it."""
        if self.first_token_at_s is None or self.received_at_s is None:
            return None
        return self.first_token_at_s - self.received_at_s


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one request fared, told once when it has ended.

    revision:      of the parameters its first decision was made under
    decided_at_s:  monotonic, ours
    ttft_s, e2e_s: receipt to first token and to the end; None where it never came so far
    failed:        it ended otherwise than well; a caller who went away is neither
    """

    revision: int
    decided_at_s: float
    ttft_s: float | None = None
    e2e_s: float | None = None
    failed: bool = False


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery says of one worker instance (all its data-parallel ranks)."""

    worker_id: int
    role: Role
    kv_block_size: int
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    model_name: str = ""
    host: str = ""  # of the address it takes requests at; empty where discovery does not say

    @property
    def ranks(self) -> range:
        """Return the data-parallel ranks this instance owns."""
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + self.data_parallel_size)


class TtftSample(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT over the recent past.

    p50_s, p99_s:  seconds, None when there were no samples
    samples:       how many requests stand behind it
    fresh:         whether at least one sample is new since the tick before
    source:        `frontend` (its histogram; the client's view) or `decisions` (the router's own)
    """

    p50_s: float | None = None
    p99_s: float | None = None
    samples: int = 0
    fresh: bool = False
    source: str = "none"


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one role's workers, summed over those present; None means unknown, never zero."""

    role: Role
    workers: int = 0
    stale_workers: int = 0
    kv_used_frac: float | None = None
    kv_used_frac_max: float | None = None
    queued_requests: int | None = None
    queued_prefill_tokens: int | None = None
    running_requests: int | None = None
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None
    busy_frac: float | None = None  # share of the last seconds in which a forward pass ran, mean over workers


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """How long one worker's forward pass takes; coefficients are never negative.

        seconds = [tokens > 0] * (prefill_base_s + prefill_token_s * tokens)
                + [requests > 0] * (decode_base_s + decode_request_s * requests
                                    + decode_kv_token_s * kv_tokens + pressure_s * pressure(kv_frac))

    Source:  theory.md, Latency models.
    """

    prefill_base_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_base_s: float = 0.0
    decode_request_s: float = 0.0
    decode_kv_token_s: float = 0.0
    pressure_s: float = 0.0


class WorkerLatency(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one worker's speed now.

    samples:        forward passes behind its curve, each counting half after the half-life
    residual_frac:  root mean square of its errors over those passes, each as a share of the pass's time
    factor:         its time over that of its pool's median worker at the same load, None when not comparable
    straggler:      the factor is over the configured one
    """

    key: WorkerKey
    role: Role
    curve: Curve
    samples: float = 0.0
    residual_frac: float | None = None
    factor: float | None = None
    straggler: bool = False


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cost beyond an unloaded system comes from, as shares that sum to 1.

    miss:        tokens computed again that the best placement would have found cached
    congestion:  waiting that the best placement would have avoided
    capacity:    what remains even under the best placement: no routing can remove it
    """

    miss: float
    congestion: float
    capacity: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """PoA-hat of a window, or the reason why there is none.

    poa_hat:     observed cost over best cost; None when absent. Never NaN, never 1.0 for want of data.
    low, high:   its 95 % interval
    samples:     `marginal`: snapshots in the window; `frozen`: decisions
    requests:    in flight in a snapshot, mean
    observed_s, optimal_s:  cost of a snapshot, mean; seconds (`frozen`: None, its cost is in blocks)
    shares:      None without cost beyond the unloaded, or when absent
    method:      `marginal` (calibrated, on snapshots) or `frozen` (the paper's, on decisions); never mixed
    legs:        the same for each leg, also for one that has no estimate, with its reason
    """

    poa_hat: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    requests: float = 0.0
    observed_s: float | None = None
    optimal_s: float | None = None
    shares: Shares | None = None
    reason: str = ""
    method: str = "marginal"
    legs: dict[str, "Estimate"] = {}

    @property
    def by_role(self) -> dict[str, float]:
        """Return PoA-hat of each leg that has one."""
        return {role: leg.poa_hat for role, leg in self.legs.items() if leg.poa_hat is not None}


class HotWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that is overloaded while its pool is not."""

    worker_id: int
    dp_rank: int
    resource: str
    value: float
    threshold: float


class PoolRegime(msgspec.Struct, frozen=True, kw_only=True):
    """The load regime of one pool, and the resource that drives it.

    resource:          `queue`, `kv_blocks`, `slots` or `iteration`; empty while nothing does
    value, threshold:  of that resource, in its unit; None while nothing drives
    hot:               workers that are overloaded by themselves: no matter of the pool's capacity
    known:             every rank says what it has queued: the evidence is complete
    idle:              known, next to nothing queued, and workers that prefill at least half idle
    """

    role: Role
    regime: Regime = Regime.BELOW
    resource: str = ""
    value: float | None = None
    threshold: float | None = None
    reason: str = ""
    hot: tuple[HotWorker, ...] = ()
    known: bool = False
    idle: bool = False


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's request to hold parameters. `until_s` is on the monotonic clock, None for ever."""

    router_temperature: float
    overlap_weight: float
    until_s: float | None = None

    @property
    def setting(self) -> Setting:
        """Return what it holds: τ and ω are the operator's, all else Dynamo's own."""
        return Setting(self.router_temperature, self.overlap_weight)
