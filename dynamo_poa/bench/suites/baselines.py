"""Which policies stand side by side, what each engine offers of them, and how KV routing's best is found.

Owns: the policies by name; the settings that are tried; which of them was best, on seeds of its own.
Does not own: what a policy does on an engine (replayed.py, live_graphs.py), which cells there are
              (catalogue.py).
Invariant: the seeds a setting is chosen by are never those it is measured on; and as all seeds of a trace ask
           the same, it is chosen on the trace's first half and can only be measured on the second.
Source: router modes and parameters: host, dynamo.frontend. τ = 0.7 and ω of 1 and 0.1: the paper's policy
        table; `prefill_load_scale` 4: measured, better than 1 where prefill is the bottleneck.
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from dynamo_poa.bench.suites.cells import Cell, Policy, Result
from dynamo_poa.errors import ConfigError
from dynamo_poa.workloads.synthetic import Trace

DEFAULT = Policy(name="kv")
# Stands for a setting that is still to be found; no engine takes it as it is. It may be the default.
BEST = Policy(name="kv best", router_temperature=-1.0)
LIVE = (
    Policy(name="round-robin", router_mode="round-robin"),
    Policy(name="random", router_mode="random"),
    Policy(name="power-of-two", router_mode="power-of-two"),
    Policy(name="least-loaded", router_mode="least-loaded"),
    DEFAULT,
    Policy(name="kv decay", credit_decay=1.0),
    BEST,
    Policy(name="ours off", plugin="off"),
    Policy(name="ours shadow", plugin="shadow"),
    Policy(name="ours active", plugin="active"),  # by the paper's table
    Policy(name="ours auto", plugin="active", table="auto"),
    Policy(name="ours marginal", plugin="active", table="marginal"),
)
JUDGED = ("kv", "ours active", "ours auto", "ours marginal")  # stand side by side wherever ours are judged
_SIMULATED = ("round-robin", "random", "kv", "kv decay", "kv best")  # static, and of Dynamo's simulator
REPLAY = tuple(policy for policy in LIVE if policy.name in _SIMULATED)

TEMPERATURES = (0.0, 0.3, 0.7)
CREDITS = (1.0, 0.5, 0.1)
LOAD_SCALES = (1.0, 4.0)
TUNING_SEEDS = (900_001, 900_002)
TUNING_REQUESTS = 1000
TUNED_BY = "ttft_mean_s"
TUNING_SUFFIX = "-tuning"


def policy(name: str) -> Policy:
    """Return a policy by its name.

    Raises:  ConfigError with the list when there is none.
    """
    for known in LIVE:
        if known.name == name:
            return known
    raise ConfigError([f"policy {name!r}: must be one of {', '.join(known.name for known in LIVE)}"])


def setting(temperature: float, credit: float, load_scale: float = 1.0) -> Policy:
    """Return KV routing with these parameters; at Dynamo's defaults it has that policy's name."""
    scale = f" scale={load_scale:g}" if load_scale != 1 else ""
    found = Policy(
        name=f"kv τ={temperature:g} ω={credit:g}{scale}",
        router_temperature=temperature,
        overlap_credit=credit,
        prefill_load_scale=load_scale,
    )
    return DEFAULT if msgspec.structs.replace(found, name=DEFAULT.name) == DEFAULT else found


def settings() -> tuple[Policy, ...]:
    """Return what is tried to find KV routing's best, Dynamo's defaults first. One of ω and scale is 1."""
    return tuple(
        setting(temperature, credit, scale)
        for scale in LOAD_SCALES
        for credit in CREDITS
        for temperature in TEMPERATURES
        if credit == 1 or scale == 1  # the plugin's ω is one or the other, so this could be served by it too
    )


def tuning_cells(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return the cells that find the best setting for those of `cells` that are to run with it: replays.

    What cannot be replayed is left out of the fleet: slow and stalled workers, further routers. So on such a
    fleet `kv best` is what the simulator would have its operator set, and `tuned_unlike` says so.

    Raises:  ConfigError when a trace would be tuned on the requests it is measured on.
    """
    found = {}
    for cell in cells:
        if cell.policy == BEST:
            for tried in settings():
                for seed in TUNING_SEEDS:
                    tuning = msgspec.structs.replace(_asked(cell), policy=tried, seed=seed)
                    found[tuning.id] = tuning
    return tuple(found.values())


def tuned_unlike(cells: Iterable[Cell]) -> str:
    """Return in words how what `kv best` was found on differs from what it was measured on, if it does."""
    best = [cell for cell in cells if cell.policy.name == BEST.name]
    without = [
        what
        for what, differs in (
            ("slow workers", any(cell.fleet.slow for cell in best)),
            ("stalls", any(cell.fleet.stall for cell in best)),
            ("further routers", any(cell.fleet.routers > 1 for cell in best)),
            ("changes of load", any(cell.phases for cell in best)),
        )
        if differs
    ]
    if not any(cell.engine == "live" for cell in best):
        return ""
    found = f"{BEST.name}: its setting was found on Dynamo's simulator"
    if not without:
        return f"{found}."
    return f"{found}, which has no {' and no '.join(without)}: there it is not the best that could be set."


def settled(cells: Sequence[Cell], tuning: Iterable[Result]) -> tuple[Cell, ...]:
    """Return the cells with the best setting in place of `BEST`; where none was found it stays.

    best = the setting whose median of mean TTFT over the tuning seeds is least; of equals the first tried
    """
    tried: dict[str, dict[str, list[float]]] = {}
    for result in tuning:
        if result.state == "done" and TUNED_BY in result.figures:
            of_group = tried.setdefault(result.cell.question, {})
            of_group.setdefault(result.cell.policy.name, []).append(result.figures[TUNED_BY])
    order = settings()

    def settle(cell: Cell) -> Cell:
        if cell.policy != BEST:
            return cell
        values = tried.get(_asked(cell).question, {})
        complete = [one for one in order if len(values.get(one.name, ())) == len(TUNING_SEEDS)]
        if not complete:
            return cell
        best = min(complete, key=lambda one: statistics.median(values[one.name]))
        return msgspec.structs.replace(cell, policy=msgspec.structs.replace(best, name=BEST.name))

    return tuple(map(settle, cells))


def _asked(cell: Cell) -> Cell:
    """Return what tuning asks for a cell: its workload on what of its fleet can be replayed."""
    content = cell.content
    if isinstance(content, Trace):
        if content.part != "second":
            raise ConfigError([f"{content.name}: part = {content.part!r}: must be 'second' with {BEST.name}"])
        content = msgspec.structs.replace(content, part="first")
    fleet = msgspec.structs.replace(
        cell.fleet, name=cell.fleet.topology, slow=(), stall=None, routers=1, replica_sync=False
    )
    return msgspec.structs.replace(
        cell,
        suite=cell.suite + TUNING_SUFFIX,
        engine="replay",
        fleet=fleet,
        content=content,
        requests=cell.requests or TUNING_REQUESTS,
        learn_s=0.0,
        warm_up_s=0.0,
        seconds=0.0,
        phases=(),
    )
