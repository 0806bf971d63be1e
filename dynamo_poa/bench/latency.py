"""How well a worker's next forward pass is foretold, on a live graph of mock workers, and what that costs.

Owns: the load, which passes are judged, what slowing a worker means, the figure.
Does not own: serving (serve/), the load client (load.py), the models (latency.py).
Invariant: a pass is judged by the fit of the second before it; nothing in it was known then.
Source: the mock engine cannot be slowed while it runs: it sleeps, so stopping its process now and then does
        not stretch its passes. The slowed workers are those of the live run as it was heard, with wall times
        times SLOWDOWN and one pass in SLOWDOWN kept from LEARN_S on, put through the same fleet and models.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop

from dynamo_poa.bench.load import ClosedLoop, LoadClient, Result, prompts
from dynamo_poa.bench.processes import busy_frac, machine_time
from dynamo_poa.bench.report import Figure, Measure, MeasurementError, at_most, plain
from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook, iteration_s, prefill_s
from dynamo_poa.serve.prepare import make_plan
from dynamo_poa.serve.supervisor import serve_graph
from dynamo_poa.values import Role, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import Cards, ForwardPass, subject

LEARN_S = 30  # issue: within 10 % after 30 s of traffic; the workers are slowed from then on
SLOWDOWN = 3
SETTLE_S = 20
PROMPT_TOKENS = 640
OUT_TOKENS = 48
USERS = (6, 24, 12, 32)  # in turn
TURN_S = 5.0
KV_BLOCKS = 4096
ENGINE = f"num-gpu-blocks-override: {KV_BLOCKS}, max-num-batched-tokens: 512"
OVERRIDES = (
    "Frontend.http_port=0",
    "PrefillWorker.workers=2",
    "PrefillWorker.per_process=2",
    f"PrefillWorker.args={{speedup-ratio: 0.5, {ENGINE}}}",
    "DecodeWorker.workers=2",
    "DecodeWorker.per_process=2",
    f"DecodeWorker.args={{speedup-ratio: 0.25, {ENGINE}}}",
    "PoaRouter.min_prefill_workers=2",
    "PoaRouter.min_decode_workers=2",
)
COST_WORKERS = 64
COST_PASSES = 100  # of each in a second
COST_SECONDS = 10


class Heard(NamedTuple):
    """A forward pass as it came, at seconds since the first one."""

    at_s: float
    subject: str
    data: bytes


class Run(NamedTuple):
    """What was heard of a graph."""

    namespace: str
    cards: tuple[WorkerCard, ...]
    passes: list[Heard]
    machine_busy_frac: float


class Judged(NamedTuple):
    """A pass and by how much of its time it was foretold wrongly."""

    at_s: float
    worker_id: int
    role: Role
    error: float


class Cost(NamedTuple):
    """CPU of the models."""

    observe_us: float
    fit_ms: list[float]


def measure(seconds: int, say: Callable[[str], None]) -> Figure:
    """Watch a graph for so many seconds, judge what was foretold, slow two of its workers, time the models.

    Raises:  MeasurementError when requests failed or too little was heard.
    """
    run: Run = uvloop.run(_live(seconds, say))
    live, _ = judge(run.namespace, run.cards, run.passes)
    busiest = {role: _busiest(live, role) for role in (Role.PREFILL, Role.DECODE)}
    slowed, found = judge(run.namespace, run.cards, list(slow(run.passes, set(busiest.values()), LEARN_S)))
    factors = {role: found[WorkerKey(worker_id, 0)].factor for role, worker_id in busiest.items()}
    return figure(run, live, busiest, slowed, factors, cost())


async def _live(seconds: int, say: Callable[[str], None]) -> Run:
    clock, results = SystemClock(), list[Result]()
    passes, cards = list[Heard](), list[Cards]()
    plan = make_plan("graphs.disagg_poa:Frontend", "graphs/disagg_poa.yaml", OVERRIDES)
    common = plan.sections["Common"]
    assert isinstance(common, CommonConfig)
    async with (
        serve_graph(plan, clock=clock) as running,
        Bus(running.nats_url, name="bench-latency", clock=clock) as bus,
    ):
        started_s = clock.monotonic_s()
        bus.subscribe(
            f"namespace.{common.worker_namespace}.component.*.endpoint.*.forward-pass-metrics",
            lambda name, data: passes.append(Heard(clock.monotonic_s() - started_s, name, data)),
        )
        decode = msgspec.msgpack.Decoder(Cards).decode
        bus.subscribe(subject(plan.namespace, "cards"), lambda _, data: cards.append(decode(data)))
        await bus.wait_connected(10.0)
        client = LoadClient(
            "127.0.0.1", urlsplit(running.http_url).port or 80, common.model_name, clock=clock
        )
        source = prompts(
            prompt_tokens=PROMPT_TOKENS, max_tokens=OUT_TOKENS, templates=5, shared_frac=0.25, seed=1
        )
        users, before = ClosedLoop(client, source, results.append, clock), machine_time()
        for concurrency in itertools.cycle(USERS):
            left_s = started_s + seconds - clock.monotonic_s()
            if left_s <= 0:
                break
            users.resize(concurrency)
            await clock.sleep(min(TURN_S, left_s))
            say(f"{clock.monotonic_s() - started_s:.0f} of {seconds} s, {len(passes)} passes")
        busy = busy_frac(before, machine_time())
        heard = list(passes)
        await users.finish()
    failed = sorted({result.error for result in results if not result.ok})
    if failed or not cards or bus.dropped:
        raise MeasurementError(f"requests failed: {failed}; cards {len(cards)}; messages lost {bus.dropped}")
    return Run(common.worker_namespace, cards[-1].cards, heard, busy)


def judge(
    namespace: str, cards: Sequence[WorkerCard], passes: Iterable[Heard]
) -> tuple[list[Judged], dict[WorkerKey, WorkerLatency]]:
    """Put passes through fleet and models with a fit a second; return all judgements and the last fit."""
    by_id = {card.worker_id: card for card in cards}
    present = [(WorkerKey(card.worker_id, rank), card.role) for card in cards for rank in card.ranks]
    found: dict[WorkerKey, WorkerLatency] = {}
    judged, book, fit_at_s = list[Judged](), LatencyBook(), 1.0
    fleet = Fleet(namespace, stale_s=30.0, on_pass=book.observe)
    fleet.set_cards(cards, 0.0)
    for heard in passes:
        while heard.at_s >= fit_at_s:
            found, fit_at_s = book.fit(fit_at_s, present), fit_at_s + 1.0
        message = fleet.observe(heard.subject, heard.data, heard.at_s, heard.at_s)
        if message is None or not isinstance(done := message.body, ForwardPass) or not done.wall_time_s:
            continue
        known = found.get(WorkerKey(done.worker_id, done.dp_rank))
        if known is not None:
            card = by_id[done.worker_id]
            kv_frac = done.decode_kv_tokens / (card.total_kv_blocks or KV_BLOCKS) / card.kv_block_size
            expected_s = prefill_s(known.curve, done.prefill_tokens) + iteration_s(
                known.curve, done.decode_requests, done.decode_kv_tokens, kv_frac
            )
            error = abs(expected_s / done.wall_time_s - 1)
            judged.append(Judged(heard.at_s, done.worker_id, card.role, error))
    return judged, found


def slow(passes: Iterable[Heard], worker_ids: set[int], since_s: float) -> Iterator[Heard]:
    """Let some workers take SLOWDOWN times as long from an instant on, and do so many passes fewer."""
    kept = dict.fromkeys(worker_ids, 0)
    for heard in passes:
        outer = msgspec.msgpack.decode(heard.data)
        payload = msgspec.msgpack.decode(outer["payload"])
        worker_id = int(payload["worker_id"])
        if worker_id in kept and heard.at_s >= since_s:
            kept[worker_id] += 1
            if kept[worker_id] % SLOWDOWN:
                continue
            payload["wall_time"] *= SLOWDOWN
            outer["payload"] = msgspec.msgpack.encode(payload)
            yield heard._replace(data=msgspec.msgpack.encode(outer))
        else:
            yield heard


def settled_s(judged: Iterable[Judged], worker_id: int, since_s: float, high: float) -> float:
    """Return how long after an instant the last second ended in which the median error was over `high`."""
    seconds = dict[int, list[float]]()
    for one in judged:
        if one.worker_id == worker_id and one.at_s >= since_s:
            seconds.setdefault(int(one.at_s - since_s), []).append(one.error)
    return max(
        (second + 1.0 for second, errors in seconds.items() if statistics.median(errors) > high), default=0.0
    )


def cost() -> Cost:
    """Time noting a pass and fitting, with many workers."""
    book, rng = LatencyBook(), random.Random(1)
    cards = [
        WorkerCard(worker_id=number, role=Role.DECODE, kv_block_size=16, total_kv_blocks=KV_BLOCKS)
        for number in range(COST_WORKERS)
    ]
    present = [(WorkerKey(card.worker_id, 0), card.role) for card in cards]
    observe_s, fit_ms = 0.0, []
    for second in range(COST_SECONDS):
        batches = [rng.randint(1, 32) for _ in range(COST_PASSES)]
        passes = [
            (
                key,
                card,
                ForwardPass(card.worker_id, 0, 1, 0.006 + 3e-4 * n, 0, 0, 0, n, 600 * n, 0, 0, 0, 0),
                second + n / 33,
            )
            for (key, _), card in zip(present, cards, strict=True)
            for n in sorted(batches)
        ]
        before_s = time.process_time()
        for one in passes:
            book.observe(*one)
        between_s = time.process_time()
        book.fit(second + 1.0, present)
        observe_s += between_s - before_s
        fit_ms.append((time.process_time() - between_s) * 1e3)
    return Cost(observe_s / (COST_SECONDS * COST_WORKERS * COST_PASSES) * 1e6, fit_ms)


def figure(
    run: Run,
    live: list[Judged],
    busiest: dict[Role, int],
    slowed: list[Judged],
    factors: dict[Role, float | None],
    spent: Cost,
) -> Figure:
    """Turn judgements into the figure.

    Raises:  MeasurementError when a role has no passes to judge.
    """
    measures = list[Measure]()
    for role, worker_id in busiest.items():
        error = _median(one.error for one in live if one.role is role and one.at_s >= LEARN_S)
        measures.append(
            at_most(f"{role}_error", f"{role}: median error after {LEARN_S} s", error * 100, "%", 10)
        )
        settle_s = settled_s(slowed, worker_id, LEARN_S, 0.15)
        measures.append(
            at_most(
                f"{role}_settled_s", f"{role}, {SLOWDOWN}x slower: within 15 % after", settle_s, "s", SETTLE_S
            )
        )
        error = _median(
            one.error for one in slowed if one.worker_id == worker_id and one.at_s >= LEARN_S + SETTLE_S
        )
        measures.append(
            at_most(
                f"{role}_slowed_error",
                f"{role}, {SLOWDOWN}x slower: median error from then on",
                error * 100,
                "%",
                15,
            )
        )
        factor = factors[role]
        if factor is not None:
            measures.append(plain(f"{role}_factor", f"{role}, {SLOWDOWN}x slower: factor", factor, "x"))
    measures.append(at_most("observe_us", "noting a pass", spent.observe_us, "µs", 5))
    measures.append(
        plain("fit_ms", f"a fit of {COST_WORKERS} workers, median", statistics.median(spent.fit_ms), "ms")
    )
    judged = {role: sum(one.role is role and one.at_s >= LEARN_S for one in live) for role in busiest}
    return Figure(
        name="latency",
        title="what the next forward pass takes, foretold by the fit of the second before",
        measures=tuple(measures),
        conditions=(
            f"live: 2 prefill and 2 decode mock workers, {' / '.join(map(str, USERS))} users in turn, "
            f"{PROMPT_TOKENS} tokens in, {OUT_TOKENS} out; {judged[Role.PREFILL]} prefill and "
            f"{judged[Role.DECODE]} decode passes judged; machine {run.machine_busy_frac:.0%} busy",
            "slower: not live, as a running mock engine cannot be slowed: the same passes, but from "
            f"{LEARN_S} s on those of each role's busiest worker with wall times x {SLOWDOWN} and one in "
            f"{SLOWDOWN} kept; its load does not respond",
            f"cost: CPU, {COST_WORKERS} workers of {COST_PASSES} passes a second each",
        ),
    )


def _busiest(judged: Iterable[Judged], role: Role) -> int:
    passes = [one.worker_id for one in judged if one.role is role]
    if not passes:
        raise MeasurementError(f"no {role} passes were heard")
    return statistics.mode(passes)


def _median(errors: Iterable[float]) -> float:
    found = list(errors)
    if not found:
        raise MeasurementError(f"no passes to judge: the run must be longer than {LEARN_S + SETTLE_S} s")
    return statistics.median(found)
