"""Everything that is Dynamo's: choosing a worker, booking it, sending to it, being registered, its simulator.

Owns: the only imports of `dynamo` in this package; override keys per Dynamo version; the mapping of
      Dynamo's plain exceptions to ours.
Does not own: when to choose (trip.py) or retry (router.py), what parameters to use (params.py).
Invariant: a KvRouter is never given an empty prompt (it dies of it) nor parameters that were not validated.
Source: measured on ai-dynamo 1.4.2 and 1.6.1. The pattern is Dynamo's own for routers outside the
        frontend (host: dynamo/global_router, dynamo/thunderagent_router).
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog
from dynamo.llm import (
    FpmEventSubscriber,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterQueueLimitExceeded,
    WorkerType,
    compute_block_hash_for_seq,
    register_model,
)
from dynamo.mocker import MockEngineArgs
from dynamo.replay import run_trace_replay
from dynamo.runtime import DistributedRuntime

from dynamo_poa.booking import PinnedBookings
from dynamo_poa.cache_question import ask_cache
from dynamo_poa.cache_whole import CacheWhole
from dynamo_poa.clock import Clock
from dynamo_poa.config import CommonConfig, RouterConfig
from dynamo_poa.errors import (
    AnswerFailed,
    ConfigError,
    ReplayError,
    RequestShed,
    Unhashed,
    Unpicked,
    WireError,
    WorkerUnreachable,
)
from dynamo_poa.handover import of_the_other_leg
from dynamo_poa.prefixes import prefix_hashes, told_blocks
from dynamo_poa.values import Address, Booked, Candidate, Role, RouterParams, WorkerCard, WorkerKey
from dynamo_poa.wire import MAX_CANDIDATES, card_from_mdc

log = structlog.get_logger(__name__)

# What the stock frontend presets on the decode leg; used where the request does not carry it.
DECODE_OVERRIDE = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}

ADDRESSES_S = 0.25

# The releases whose request plane the tests have seen (tests/integration, tests/compat): it is no public
# interface, any other may differ.
RELAY_TESTED = ("1.4.2", "1.6.1")

# Plain `Exception`s whose text says that the worker could not be reached, or died before its first chunk.
# Source: measured, killing workers.
_UNREACHABLE = (
    "Connection refused",
    "Connection reset",
    "CannotConnect",
    "Broken pipe",
    "not found in",
    "Stream ended before generation completed",
)


def open_runtime() -> DistributedRuntime:
    """Join Dynamo under the environment's discovery backend, request plane and event plane."""
    return DistributedRuntime(
        asyncio.get_running_loop(),
        os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
        os.environ.get("DYN_REQUEST_PLANE", "tcp"),
    )


def dynamo_version() -> str:
    """Return the release of ai-dynamo this process runs on: of the part that speaks on the wire."""
    return importlib.metadata.version("ai-dynamo-runtime")


def relay_lack(discovery: str, version: str, request_plane: str = "tcp") -> str:
    """Return why the relay may not be used, in words; empty when it may.

    What only an attempt shows, such as an etcd that asks for a password, comes as RecordUnchangeable.

    Args:     discovery: `Common.discovery`, or a backend's name as DYN_DISCOVERY_BACKEND has it.
              version: ai-dynamo's.
    """
    if version not in RELAY_TESTED:
        return (
            f"ai-dynamo {version} is not among the releases the relay is tested on: {', '.join(RELAY_TESTED)}"
        )
    if request_plane != "tcp":
        return f"the relay speaks the tcp request plane, not {request_plane}"
    if discovery not in ("file", "etcd") and not discovery.startswith("etcd://"):
        return f"an instance's address cannot be rewritten in discovery {discovery}"
    return ""


def use_relay(config: RouterConfig, lack: str) -> bool:
    """Decide the data path: `relay` insists, `auto` takes the relay unless something is lacking, and says so.

    Raises:  ConfigError when the relay is asked for and cannot be used.
    """
    if config.data_path == "relay" and lack:
        raise ConfigError([f"{config.PATH}.data_path = 'relay': {lack}"])
    if config.data_path == "auto" and lack:
        log.info("poa.data_path.chosen", data_path="stream", reason=lack)
    return config.data_path != "stream" and not lack


def router_override(
    role: Role, overlap_key: str, params: RouterParams, preset: dict[str, Any] | None
) -> dict[str, Any]:
    """Express the parameters as KvRouter's per-request override.

    On the decode leg Dynamo's own preset stays as it is and only τ is added: Dynamo ignores overlap there.

    Args:     preset: `router_config_override` as the frontend sent it; None when it sent none.
    Source:   measured: unknown keys are ignored in silence, so only keys that were seen to act are used.
    """
    if role is Role.DECODE:
        return {**DECODE_OVERRIDE, **(preset or {}), "router_temperature": params.router_temperature}
    scale = params.prefill_load_scale
    return {
        **(preset or {}),
        "router_temperature": params.router_temperature,
        **({} if scale is None else {"prefill_load_scale": scale}),
        overlap_key: params.overlap_weight,  # last: where ω is the scale, it is ω that is configured
    }


class WorkerDirectory:
    """Which workers of some endpoints are alive, with their model cards; a live snapshot, read in O(1).

    block_size:  workers with another one are refused: KvRouter would find no overlap and say nothing (E6);
                 None takes any
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoints: dict[Role, str],
        clock: Clock,
        *,
        block_size: int | None = None,
    ) -> None:
        self._runtime, self._endpoints, self._clock = runtime, endpoints, clock
        self._block_size = block_size
        self._cards: dict[int, WorkerCard] = {}
        self._raw: dict[int, dict[str, Any]] = {}
        self._refused: set[int] = set()
        self._ranks: dict[Role, list[tuple[WorkerKey, WorkerCard]]] = {}
        self._watches: list[_Watch] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin watching discovery."""
        for path in dict.fromkeys(self._endpoints.values()):
            endpoint = self._runtime.endpoint(path)
            self._watches.append(_Watch(endpoint, await endpoint.client()))
        self._task = asyncio.create_task(self._follow(), name="worker-directory")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for watch in self._watches:
            watch.close()

    @property
    def task(self) -> "asyncio.Task[None] | None":
        """Return what follows discovery; it ends only by failing."""
        return self._task

    def cards(self) -> list[WorkerCard]:
        """Return the cards of the workers that discovery lists now."""
        return list(self._cards.values())

    def card(self, worker_id: int) -> WorkerCard | None:
        """Return one worker's card, None when it is gone or not known yet."""
        return self._cards.get(worker_id)

    def ranks(self, role: Role) -> Sequence[tuple[WorkerKey, WorkerCard]]:
        """Return all ranks of a role's workers; the same object until a worker comes or leaves."""
        found = self._ranks.get(role)
        if found is None:
            found = self._ranks[role] = [
                (WorkerKey(card.worker_id, rank), card)
                for card in self._cards.values()
                if card.role is role
                for rank in card.ranks
            ]
        return found

    def raw_card(self, role: Role) -> dict[str, Any]:
        """Return the model card of any one worker of a role as Dynamo wrote it, empty when there is none."""
        return next((self._raw[w] for w, card in self._cards.items() if card.role is role), {})

    def refused(self, worker_id: int) -> bool:
        """Tell whether a worker is listed but not to be used, for what its card says."""
        return worker_id in self._refused

    def count(self, role: Role) -> int:
        """Return how many workers of a role are alive."""
        return sum(card.role is role for card in self._cards.values())

    async def cache_of(self, key: WorkerKey, publisher_id: int) -> CacheWhole:
        """Return what a worker says lies in the cache of one of its ranks.

        Args:    publisher_id: of the rank's kv-events.
        Raises:  WorkerUnreachable, also when it serves no such question; WireError.
        Source:  measured on 1.4.2: a process serves all its endpoints at one address, so none is looked up
                 in discovery: a client there costs threads and inotify instances that never come back.
        """
        transports = (watch.transport(key.worker_id) for watch in self._watches)
        served = next(filter(None, transports), "").rpartition("/")[0]
        return await ask_cache(f"{served}/worker_kv_query_source_{publisher_id:x}", key)

    def refresh(self) -> None:
        """Take over what discovery says now."""
        before, alive = set(self._cards), dict[int, WorkerCard]()  # reading adds to the cards
        for watch in self._watches:
            listed = watch.instance_ids()
            unread = listed - self._cards.keys() - self._refused
            for worker_id, text in watch.cards_of(unread).items():
                self._read(worker_id, text, watch.host(worker_id))
            alive |= {worker_id: self._cards[worker_id] for worker_id in listed & self._cards.keys()}
        if alive.keys() != before:
            self._ranks = {}
        self._cards = alive
        self._raw = {worker_id: self._raw[worker_id] for worker_id in alive}

    def _read(self, worker_id: int, text: str, host: str) -> None:
        """Take a card in, or refuse its worker: once is enough, a card does not change."""
        try:
            raw = json.loads(text)
            card = msgspec.structs.replace(card_from_mdc(worker_id, raw), host=host)
        except (ValueError, WireError) as error:
            self._refuse(worker_id, str(error))
            return
        if self._block_size not in (None, card.kv_block_size):
            sizes = f"its KV block size is {card.kv_block_size}, Common.block_size = {self._block_size}"
            self._refuse(worker_id, sizes)
            return
        self._raw[worker_id], self._cards[worker_id] = raw, card

    def _refuse(self, worker_id: int, why: str) -> None:
        self._refused.add(worker_id)
        log.error("poa.card.refused", worker_id=str(worker_id), error=why)

    async def _follow(self) -> None:
        while True:
            self.refresh()
            await self._clock.sleep(0.25)


class _Watch:
    """One endpoint's instances and, while some have not been read, their model cards.

    Dynamo gives cards only through its tracker of forward-pass metrics, which then receives every message
    of every worker (measured: 5 % of a core for six busy workers), so it runs only while it is needed.
    """

    def __init__(self, endpoint: Any, client: Any) -> None:
        self._endpoint, self._client = endpoint, client
        self._tracker: Any = None

    def instance_ids(self) -> set[int]:
        """Return who is listed now."""
        return set(self._client.instance_ids())

    def host(self, worker_id: int) -> str:
        """Return where an instance takes requests; empty when it is not on tcp or the address is none."""
        with contextlib.suppress(ValueError):
            return Address.parse(self.transport(worker_id)).host
        return ""

    def transport(self, worker_id: int) -> str:
        """Return an instance's `host:port/path`; empty when it is not listed, or not on tcp."""
        for instance in self._client.instances():
            if instance.instance_id == worker_id and instance.transport.kind == "tcp":
                return str(instance.transport.address)
        return ""

    def cards_of(self, unread: set[int]) -> dict[int, str]:
        """Return those of the wanted cards that have come; call again for the rest."""
        if not unread:
            self.close()
            return {}
        if self._tracker is None:
            self._tracker = FpmEventSubscriber(self._endpoint)
            self._tracker.start_tracking()
        cards = {int(worker): text for worker, text in self._tracker.get_model_cards().items()}
        return {worker_id: cards[worker_id] for worker_id in unread & cards.keys()}

    def close(self) -> None:
        """Stop the tracker, if it runs."""
        if self._tracker is not None:
            self._tracker.shutdown()
            self._tracker = None


class WorkerPool:
    """Dynamo's own router over one pool of workers, and the way to reach them."""

    def __init__(
        self,
        router: Any,
        client: Any,
        role: Role,
        block_size: int,
        clock: Clock,
        pinned: PinnedBookings | None = None,
    ) -> None:
        self._router, self._client, self._role, self._block_size = router, client, role, block_size
        self._clock, self._pinned = clock, pinned
        self._addresses: dict[int, Address] = {}
        self._addresses_at_s = float("-inf")
        self._unaddressed: set[int] = set()  # listed with an address that was not understood

    @classmethod
    async def open(
        cls,
        runtime: DistributedRuntime,
        role: Role,
        config: RouterConfig,
        common: CommonConfig,
        clock: Clock,
        pinned: PinnedBookings | None = None,
    ) -> "WorkerPool":
        """Create the KvRouter and the client of a role's worker endpoint.

        Args:  pinned: how bookings are told that are not KvRouter's own choice; None where it hears of none.
        """
        endpoint = runtime.endpoint(common.worker_endpoint(role))
        settings = KvRouterConfig(
            router_temperature=config.router_temperature,
            # decode workers publish no KV events, and overlap does not count there
            use_kv_events=role is not Role.DECODE,
            router_replica_sync=config.replica_sync or pinned is not None,
            router_policy_config=config.policy_config or None,
        )
        router = KvRouter(endpoint, common.block_size, settings)
        return cls(router, await endpoint.client(), role, common.block_size, clock, pinned)

    async def candidates(self, token_ids: list[int]) -> tuple[Candidate, ...]:
        """Return every worker's load as KvRouter sees it, and what this prompt would add.

        KvRouter gives loads with a prompt included; the difference to the loads without it is what the
        prompt adds. Both are asked for at once. On the decode leg nothing is reused and nothing prefilled
        under Dynamo's own override, so the prompt adds its full blocks everywhere and one question does.
        """
        asked = [self._router.get_potential_loads([])]
        if self._role is not Role.DECODE:
            asked.append(self._router.get_potential_loads(token_ids))
        before, *with_prompt = [await answer for answer in asked]
        if len(before) > MAX_CANDIDATES:
            return ()
        prompt_blocks = len(token_ids) // self._block_size
        after = {(load["worker_id"], load["dp_rank"]): load for load in (with_prompt or [before])[0]}
        found = []
        for load in before:
            then = after.get((load["worker_id"], load["dp_rank"]))
            if then is None:
                continue  # left between the two answers
            uncached_tokens = then["potential_prefill_tokens"] - load["potential_prefill_tokens"]
            added_blocks = then["potential_decode_blocks"] - load["potential_decode_blocks"]
            found.append(
                Candidate(
                    worker_id=load["worker_id"],
                    dp_rank=load["dp_rank"],
                    uncached_tokens=max(uncached_tokens, 0),
                    queued_prefill_tokens=load["potential_prefill_tokens"],
                    decode_blocks=load["potential_decode_blocks"],
                    active_requests=load["active_requests"],
                    added_blocks=max(added_blocks, 0) if with_prompt else prompt_blocks,
                )
            )
        return tuple(found)

    async def overlaps(self, token_ids: list[int]) -> dict[tuple[int, int], int]:
        """Return how many of the prompt's tokens each rank holds, by KvRouter's index; absent is none.

        Blocks in slower tiers count as KvRouter credits them.

        Raises:  Unpicked when it does not say.
        """
        try:
            scores = await self._router.get_overlap_scores(token_ids)
            block_size, most = self._block_size, len(token_ids)
            return {
                (worker["worker_id"], worker["dp_rank"]): min(int(blocks * block_size), most)
                for worker in scores["workers"]
                if (blocks := worker["router_credit_blocks"]) > 0
            }
        except Exception as error:  # Dynamo raises plain Exception; another release may answer in other words
            raise Unpicked("failed", str(error)) from error

    def prefix(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the hashes of the prompt's first 1, 2, 4, ... blocks; none for less than a block.

        The router's event loop waits for it, so what is beyond PREFIX_TOKENS is not hashed: of prompts that
        have more in common the rest is not told.

        What kv-events say of the same blocks rolls to the same hashes, but where a request has images or an
        adapter: workers mix those into their blocks' hashes, and KvRouter is not told of them here either.

        Raises:   Unhashed when Dynamo does not hash it.
        Source:   measured on 1.4.2, in blocks of 16: 70 us for 4,096 tokens (bench decide), 0.5 ms at most,
                  where 131,072 tokens whole would take 2 ms.
        """
        tokens = told_blocks(len(token_ids), self._block_size) * self._block_size
        try:
            return prefix_hashes(compute_block_hash_for_seq(token_ids[:tokens], self._block_size))
        except Exception as error:  # Dynamo raises plain Exception; another release may answer in other words
            raise Unhashed(str(error)) from error

    def book_pinned(
        self, token_ids: list[int], worker: WorkerKey, uncached_tokens: int, booking: str
    ) -> bool:
        """Have KvRouter count a request as the load of a worker it did not choose, until `free(booking)`.

        Does not wait. Returns False where KvRouter will not know of it.
        """
        if self._pinned is None:
            return False
        prefilled = None if self._role is Role.DECODE else uncached_tokens
        return self._pinned.add(booking, worker, token_ids, prefilled)

    async def book(self, token_ids: list[int], override: dict[str, Any], booking: str) -> Booked:
        """Let KvRouter choose a worker and count the request as its load, until `free(booking)`.

        Cancelled, the booking is ended when it is known: `free` before that would free nothing.
        """
        choosing = asyncio.ensure_future(self._router.best_worker(token_ids, override, booking))
        try:
            worker_id, dp_rank, overlap_blocks = await asyncio.shield(choosing)
        except asyncio.CancelledError:
            choosing.add_done_callback(functools.partial(self._unbook, booking))
            raise
        except RouterQueueLimitExceeded as error:
            raise RequestShed(str(error)) from error
        # the decode leg computes no prompt; what KvRouter calls overlap there is its own guess
        cached_blocks = 0 if self._role is Role.DECODE else overlap_blocks
        cached_tokens = min(cached_blocks * self._block_size, len(token_ids))
        return Booked(WorkerKey(worker_id, dp_rank), cached_tokens)

    def _unbook(self, booking: str, choosing: "asyncio.Future[Any]") -> None:
        if not choosing.cancelled() and choosing.exception() is None:
            self.free(booking)

    def prefilled(self, booking: str) -> None:
        """Tell KvRouter that the first token is out. Does not wait."""
        if self._pinned is not None and self._pinned.prefilled(booking):
            return
        _let_run(self._router.mark_prefill_complete(booking))

    def free(self, booking: str) -> None:
        """End a booking. Does not wait; an unknown one is no error."""
        if self._pinned is not None and self._pinned.free(booking):
            return
        _let_run(self._router.free(booking))

    def address(self, worker_id: int) -> Address | None:
        """Return where a worker takes requests, None when discovery does not list it or it is not on tcp.

        Discovery is read again for a worker not seen before, and four times a second: an address may change.
        """
        if (
            self._clock.monotonic_s() - self._addresses_at_s >= ADDRESSES_S
            or worker_id not in self._addresses
        ):
            self._read_addresses()
        return self._addresses.get(worker_id)

    def addresses(self) -> list[Address]:
        """Return where the workers that discovery lists now take requests."""
        self._read_addresses()
        return list(self._addresses.values())

    def _read_addresses(self) -> None:
        """Take over what discovery says now. Source: measured: 1.6 us a worker."""
        found = {}
        for instance in self._client.instances():
            transport = instance.transport
            if transport.kind == "tcp":
                try:
                    found[instance.instance_id] = Address.parse(transport.address)
                except ValueError as error:
                    if instance.instance_id not in self._unaddressed:
                        log.error(
                            "poa.address.refused", worker_id=str(instance.instance_id), error=str(error)
                        )
                    self._unaddressed.add(instance.instance_id)
        self._addresses, self._addresses_at_s = found, self._clock.monotonic_s()

    async def send(
        self, request: dict[str, Any], worker: WorkerKey, context: Any
    ) -> tuple[Any, AsyncIterator[Any]]:
        """Send to one worker and wait for its first chunk.

        Returns:  the first chunk and the stream of the rest.
        Raises:   WorkerUnreachable when the connection failed before anything came, AnswerFailed when the
                  other leg's worker is what failed.
        """
        routing = request.get("routing") or {}
        request["routing"] = {**routing, "dp_rank": worker.dp_rank}
        try:
            stream = await self._client.direct(request, worker.worker_id, annotated=False, context=context)
            return await anext(stream), stream
        except StopAsyncIteration:
            raise WorkerUnreachable(worker.worker_id, "the stream ended before its first chunk") from None
        except Exception as error:  # Dynamo raises plain Exception: only its text tells what happened
            if of_the_other_leg(str(error)):
                raise AnswerFailed(worker.worker_id, str(error)) from error
            if any(sign in str(error) for sign in _UNREACHABLE):
                raise WorkerUnreachable(worker.worker_id, str(error)) from error
            raise


@functools.lru_cache(maxsize=65_536)  # prompts share their beginnings
def _chained(before: int, block: int) -> int:
    """Return the hash of a block behind others: Dynamo's own function over both hashes, low halves first.

    Source:  measured on 1.4.2: equal to what KvRouter tells its replicas.
    """
    halves = [before & 0xFFFF_FFFF, before >> 32, block & 0xFFFF_FFFF, block >> 32]
    return int(compute_block_hash_for_seq(halves, len(halves))[0])


def sequence_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return what KvRouter knows a prompt's full blocks by: each hash stands for all up to its block."""
    found: list[int] = []
    for block in compute_block_hash_for_seq(token_ids, block_size):
        found.append(_chained(found[-1], block) if found else block)
    return found


def _let_run(call: Awaitable[None]) -> None:
    """Start one of Dynamo's calls without waiting; its failure means the booking was gone already."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


Handler = Callable[[dict[str, Any], Any], AsyncIterator[Any]]

_WORKER_TYPES = {
    Role.PREFILL: (WorkerType.Prefill, ModelType.Prefill, [[WorkerType.Decode]]),
    Role.DECODE: (WorkerType.Decode, ModelType.Chat | ModelType.Completions, [[WorkerType.Prefill]]),
    Role.AGGREGATED: (WorkerType.Aggregated, ModelType.Chat | ModelType.Completions, None),
}


async def register(
    endpoint: Any, role: Role, common: CommonConfig, card: dict[str, Any], *, bootstrap: bool
) -> None:
    """Announce the plugin's end of a leg to the frontend, with what the workers' own card says of them.

    Args:     bootstrap: makes the frontend run both legs at once and send `bootstrap_info`; the address
              given here is a placeholder that the handlers replace by the chosen worker's.
    """
    worker_type, model_type, needs = _WORKER_TYPES[role]
    runtime = card.get("runtime_config") or {}
    own = ModelRuntimeConfig()
    for key in (
        "total_kv_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tool_call_parser",
        "reasoning_parser",
    ):
        if runtime.get(key) is not None:
            setattr(own, key, runtime[key])
    if bootstrap and role is Role.PREFILL:
        own.set_disaggregated_endpoint("127.0.0.1", 1)
    await register_model(
        ModelInput.Tokens,
        model_type,
        endpoint,
        common.model_path,
        common.model_name,
        worker_type=worker_type,
        needs=needs,
        kv_cache_block_size=common.block_size,
        runtime_config=own,
    )


async def leave(endpoints: list[Any]) -> None:
    """Take endpoints out of discovery while they go on serving. Source: host: graceful_shutdown.py."""
    left = await asyncio.gather(
        *(endpoint.unregister_endpoint_instance() for endpoint in endpoints), return_exceptions=True
    )
    for error in left:
        if isinstance(error, Exception):  # discovery is away: the frontend finds out by itself
            log.warning("poa.endpoint.unregistered", error=str(error))


def replay_trace(
    trace: Path,
    records: Path,
    *,
    trace_block_tokens: int,
    workers: Mapping[Role, int],
    engine: Mapping[str, Any],
    router: Mapping[str, float] | None,
    users: int | None,
    prefill_engine: Mapping[str, Any] | None = None,
) -> None:
    """Run a trace through Dynamo's simulator, in virtual time, and write a JSON record of each request.

    Two runs of the same differ a little: the router breaks ties and draws by chance, without a seed.

    Args:     trace: Mooncake JSONL.  workers: either aggregated ones or prefill and decode.
              engine: MockEngineArgs of every worker.  router: KvRouterConfig's values; None: round-robin.
              users: of a closed loop; None: the trace's own times.
              prefill_engine: MockEngineArgs that prefill workers have instead.
    Raises:   ReplayError with what Dynamo said.
    """
    try:
        of_role = {Role.PREFILL: {**engine, **(prefill_engine or {})}}
        args = {role: MockEngineArgs(**of_role.get(role, engine), worker_type=role.value) for role in workers}
        run_trace_replay(
            trace,
            extra_engine_args=args.get(Role.AGGREGATED),
            prefill_engine_args=args.get(Role.PREFILL),
            decode_engine_args=args.get(Role.DECODE),
            num_workers=workers.get(Role.AGGREGATED, 1),
            num_prefill_workers=workers.get(Role.PREFILL, 1),
            num_decode_workers=workers.get(Role.DECODE, 1),
            router_mode="round_robin" if router is None else "kv_router",
            router_config=None if router is None else KvRouterConfig(**router),
            replay_concurrency=users,
            trace_block_size=trace_block_tokens,
            report_jsonl_path=records,
        )
    except Exception as error:  # Dynamo raises plain Exception, whatever is wrong
        raise ReplayError(str(error)) from error
