"""How a graph is loaded for one turn of a comparison, and what is counted meanwhile.

Owns: the load of a turn, its warm-up, processor time by process.
Does not own: which graphs are compared and in what order (hop.py, relay.py), the load client (load.py).
Invariant: counting begins when the load is steady and ends before it stops; a turn leaves nothing running.
Source: CPU of processes as proc(5) counts it.
"""

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import msgspec

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.processes import busy_frac, cpu_s, machine_time
from dynamo_poa.bench.report import MeasurementError
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import Running, serve_graph

CONCURRENCY = 128
PROMPT_TOKENS = 128
OUT_TOKENS = 64
WARM_UP_S = 2.0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of load on one graph, from after its warm-up on. CPU in seconds by process.

    requests:  that ended well
    tokens:    that came, also of requests that had begun before or were not over at the end
    """

    seconds: float
    requests: int
    tokens: int
    failed: int
    ttft_p50_s: float
    cpu_s: dict[str, float]
    machine_busy_frac: float
    client_cpu_s: float
    idle_graph_cpu_s: float
    others_cpu_s: float  # whatever else this machine did meanwhile

    @property
    def rps(self) -> float:
        """Return completed requests a second."""
        return self.requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return tokens a second: steadier than requests, which end in waves."""
        return self.tokens / self.seconds

    def us_per_request(self, *names: str) -> float:
        """Return processor time of some processes per completed request."""
        return sum(self.cpu_s.get(name, 0.0) for name in names) / self.requests * 1e6

    def us_per_token(self, *names: str) -> float:
        """Return processor time of some processes per token."""
        return sum(self.cpu_s.get(name, 0.0) for name in names) / self.tokens * 1e6


async def start(stack: AsyncExitStack, target: str, overrides: tuple[str, ...]) -> Running:
    """Serve a graph until the stack closes."""
    return await stack.enter_async_context(serve_graph(make_plan(target, None, overrides)))


async def take_turn(
    graph: Running, idle: Sequence[Running], out_tokens: int, turn_s: float, seed: int
) -> Turn:
    """Load one graph while others wait for their turn.

    Raises:  MeasurementError when no request succeeded.
    """
    clock, results = SystemClock(), list[Result]()
    common = graph.plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    port = urlsplit(graph.http_url).port or 80
    client = LoadClient("127.0.0.1", port, common.model_name, clock=clock)
    source = prompts(
        prompt_tokens=PROMPT_TOKENS, max_tokens=out_tokens, templates=5, shared_frac=0.25, seed=seed
    )
    users = ClosedLoop(client, source, results.append, clock)
    users.resize(CONCURRENCY)
    await clock.sleep(WARM_UP_S)
    done_before, tokens_before = len(results), client.tokens
    before, idle_before_s = _cpu_by_process(graph), _cpu_s(idle)
    machine_before, own_before_s = machine_time(), time.process_time()
    started_s = clock.monotonic_s()
    await clock.sleep(turn_s)
    seconds = clock.monotonic_s() - started_s
    done, tokens = results[done_before:], client.tokens - tokens_before
    after, idle_after_s = _cpu_by_process(graph), _cpu_s(idle)
    own_after_s, machine_after = time.process_time(), machine_time()
    await users.finish()
    await asyncio.sleep(0.5)  # what the turn has left behind, bookings and events, is over
    good = [result for result in done if result.ok]
    ttfts_s = [result.ttft_s for result in good if result.ttft_s is not None]
    if not ttfts_s:
        errors = sorted({result.error for result in results if not result.ok})
        raise MeasurementError(f"{graph.plan.target}: no request succeeded in {seconds:.0f} s: {errors[:3]}")
    spent_s = {name: after[name] - before[name] for name in after}
    idle_s, own_s = idle_after_s - idle_before_s, own_after_s - own_before_s
    busy_s = machine_after.busy_s - machine_before.busy_s
    return Turn(
        seconds=seconds,
        requests=len(good),
        tokens=tokens,
        failed=len([result for result in results if not result.ok]),
        ttft_p50_s=statistics.median(ttfts_s),
        cpu_s=spent_s,
        machine_busy_frac=busy_frac(machine_before, machine_after),
        client_cpu_s=own_s,
        idle_graph_cpu_s=idle_s,
        others_cpu_s=busy_s - sum(spent_s.values()) - idle_s - own_s,
    )


def _cpu_s(graphs: Sequence[Running]) -> float:
    return sum(sum(_cpu_by_process(graph).values()) for graph in graphs)


def _cpu_by_process(graph: Running) -> dict[str, float]:
    found = {}
    for process in graph.plan.processes:
        pid = graph.process(process.name).pid
        if pid is None:
            raise MeasurementError(f"{graph.plan.target}: {process.name} is down")
        found[process.name] = cpu_s(pid)
    return found


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)
