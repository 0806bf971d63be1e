"""How the parameters become Dynamo's override, and what its plain exceptions mean."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from dynamo.llm import compute_block_hash_for_seq
from fakes import A
from structlog.testing import capture_logs

from dynamo_poa.clock import ManualClock
from dynamo_poa.config import RouterConfig
from dynamo_poa.dynamo_host import (
    DECODE_OVERRIDE,
    WorkerDirectory,
    WorkerPool,
    _Watch,
    dynamo_version,
    relay_lack,
    router_override,
    use_relay,
)
from dynamo_poa.errors import ConfigError, Unhashed, Unpicked, WorkerUnreachable
from dynamo_poa.prefixes import prefix_hashes, roll
from dynamo_poa.values import Address, Booked, Candidate, Role, RouterParams, WorkerKey

PARAMS = RouterParams(revision=3, router_temperature=0.7, overlap_weight=0.1)


def test_on_prefill_and_aggregated_both_values_are_stamped() -> None:
    """ω becomes the configured key; what the frontend preset otherwise stays."""
    for role in (Role.PREFILL, Role.AGGREGATED):
        assert router_override(role, "overlap_score_credit", PARAMS, None) == {
            "router_temperature": 0.7,
            "overlap_score_credit": 0.1,
        }
    assert router_override(Role.PREFILL, "prefill_load_scale", PARAMS, {"assume_kv_reuse": True}) == {
        "assume_kv_reuse": True,
        "router_temperature": 0.7,
        "prefill_load_scale": 0.1,
    }


def test_a_prefill_load_scale_is_stamped_where_it_acts() -> None:
    """Not on the decode leg; where ω is the scale, ω is what is configured."""
    params = RouterParams(revision=3, router_temperature=0.7, overlap_weight=0.1, prefill_load_scale=4.0)
    stamped = {"router_temperature": 0.7, "overlap_score_credit": 0.1, "prefill_load_scale": 4.0}
    for role in (Role.PREFILL, Role.AGGREGATED):
        assert router_override(role, "overlap_score_credit", params, None) == stamped
        assert router_override(role, "prefill_load_scale", params, None) == {
            "router_temperature": 0.7,
            "prefill_load_scale": 0.1,
        }
    assert router_override(Role.DECODE, "overlap_score_credit", params, None) == {
        **DECODE_OVERRIDE,
        "router_temperature": 0.7,
    }


def test_on_decode_dynamos_own_override_stays_and_only_temperature_is_added() -> None:
    """Source: what the stock frontend presets on the decode leg, measured."""
    preset = {**DECODE_OVERRIDE, "prefill_load_scale": None}
    assert router_override(Role.DECODE, "overlap_score_credit", PARAMS, preset) == {
        **preset,
        "router_temperature": 0.7,
    }
    assert router_override(Role.DECODE, "overlap_score_credit", PARAMS, None)["assume_kv_reuse"] is False


class QueueingRouter:
    """KvRouter that books only after a while, and knows what is booked."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.booked: set[str] = set()
        self.tasks: list[asyncio.Task[None]] = []

    def best_worker(
        self, token_ids: list[int], override: object, booking: str
    ) -> "asyncio.Future[tuple[int, int, int]]":
        """Book in a task of its own, as Dynamo does: whether the answer is awaited makes no difference."""
        answer: asyncio.Future[tuple[int, int, int]] = asyncio.get_running_loop().create_future()

        async def book() -> None:
            await self.gate.wait()
            self.booked.add(booking)
            if not answer.done():
                answer.set_result((A, 0, 1))

        self.tasks.append(asyncio.create_task(book()))
        return answer

    async def free(self, booking: str) -> None:
        self.booked.discard(booking)


async def test_a_choice_that_nobody_waits_for_any_more_leaves_no_booking() -> None:
    """A client may leave while Dynamo queues its request: `free` then comes before there is what to free."""
    router = QueueingRouter()
    pool = WorkerPool(router, None, Role.PREFILL, 16, ManualClock())
    choosing = asyncio.ensure_future(pool.book([1] * 32, {}, "b1"))
    await asyncio.sleep(0)
    choosing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await choosing
    pool.free("b1")  # as a leg does on its way out
    await asyncio.sleep(0)
    router.gate.set()
    kept = await pool.book([1] * 32, {}, "b2")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (kept, router.booked) == (Booked(WorkerKey(A, 0), 16), {"b2"})


class Router:
    async def get_potential_loads(self, token_ids: list[int]) -> list[dict[str, int]]:
        uncached = 48 if token_ids else 0
        loads = [
            {
                "worker_id": A,
                "dp_rank": 0,
                "potential_prefill_tokens": 100 + uncached,
                "potential_decode_blocks": 7 + (4 if token_ids else 0),
                "active_requests": 2,
            }
        ]
        if token_ids:
            loads.append({**loads[0], "worker_id": 5})  # joined between the two answers
        return loads


async def test_candidates_are_loads_before_the_prompt_and_what_it_would_add() -> None:
    """Dynamo's loads include the prompt: the difference is its uncached tokens."""
    pool = WorkerPool(Router(), None, Role.PREFILL, 16, ManualClock())
    assert await pool.candidates([1] * 64) == (Candidate(A, 0, 48, 100, 7, 2, 4),)
    pool = WorkerPool(Router(), None, Role.DECODE, 16, ManualClock())
    assert await pool.candidates([1] * 70) == (Candidate(A, 0, 0, 100, 7, 2, 4),)


class Overlaps:
    """KvRouter's index."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get_overlap_scores(self, token_ids: list[int]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_cached_tokens_are_the_index_s_blocks_and_no_more_than_the_prompt() -> None:
    """By rank; ids of workers take all 64 bits. A rank that holds nothing is not named."""
    big = 2**64 - 1
    workers = [(A, 0, 2.0), (A, 1, 0.0), (big, 0, 9.5)]
    answer = {
        "workers": [
            {"worker_id": worker, "dp_rank": rank, "router_credit_blocks": blocks}
            for worker, rank, blocks in workers
        ]
    }
    pool = WorkerPool(Overlaps(answer), None, Role.PREFILL, 16, ManualClock())
    assert await pool.overlaps([1] * 70) == {(A, 0): 32, (big, 0): 70}
    assert (await pool.overlaps([1] * 70))[WorkerKey(big, 0)] == 70


@pytest.mark.parametrize("answer", [Exception("no index"), {}, {"workers": [{"worker_id": A}]}])
async def test_an_index_that_does_not_say_leaves_the_choice_to_dynamo(answer: Any) -> None:
    """It raises plain Exception; another release may answer in other words."""
    pool = WorkerPool(Overlaps(answer), None, Role.PREFILL, 16, ManualClock())
    with pytest.raises(Unpicked) as unpicked:
        await pool.overlaps([1] * 70)
    assert unpicked.value.reason == "failed"


def test_a_prompt_s_prefixes_are_its_blocks_rolled_up() -> None:
    """Dynamo's own block hashes, at 1, 2 and 4 of five full blocks; the rest of the prompt is no block."""
    pool = WorkerPool(None, None, Role.PREFILL, 16, ManualClock())
    tokens = list(range(87))
    first, second, third, fourth, _ = compute_block_hash_for_seq(tokens, 16)
    two = roll(first, second)
    assert pool.prefix(tokens) == (first, two, roll(roll(two, third), fourth))
    assert pool.prefix(tokens[:15]) == ()


def test_of_a_long_prompt_only_the_beginning_is_hashed() -> None:
    """131,072 tokens would take 2 ms of the router's event loop."""
    pool = WorkerPool(None, None, Role.PREFILL, 16, ManualClock())
    tokens = list(range(70_000))
    assert pool.prefix(tokens) == prefix_hashes(compute_block_hash_for_seq(tokens, 16))[:12]


def test_a_prompt_that_cannot_be_hashed_has_no_prefixes() -> None:
    """Dynamo takes 32-bit token ids and raises in its own words."""
    with pytest.raises(Unhashed):
        WorkerPool(None, None, Role.PREFILL, 16, ManualClock()).prefix([-1] * 16)


class Client:
    def __init__(self, error: str | None, chunks: int = 2, *, late: bool = False) -> None:
        self._error, self._chunks, self._late = error, chunks, late
        self.request: dict[str, Any] = {}

    async def direct(self, request: dict[str, Any], worker_id: int, *, annotated: bool, context: Any) -> Any:
        self.request = request
        if self._error and not self._late:
            raise Exception(self._error)  # what Dynamo raises
        return self._stream()

    async def _stream(self) -> Any:
        for number in range(self._chunks):
            yield {"token_ids": [number]}
        if self._late:
            raise ValueError(self._error)  # likewise, of a worker that was killed


async def test_the_rank_travels_with_the_request_and_the_first_chunk_is_awaited() -> None:
    """Each data-parallel rank has its own queue: the request says which."""
    client = Client(None)
    first, rest = await WorkerPool(None, client, Role.DECODE, 16, ManualClock()).send(
        {"routing": {"prefill_worker_id": 9}}, WorkerKey(A, 3), None
    )
    assert first == {"token_ids": [0]}
    assert [chunk async for chunk in rest] == [{"token_ids": [1]}]
    assert client.request["routing"] == {"prefill_worker_id": 9, "dp_rank": 3}


@pytest.mark.parametrize(
    "client",
    [
        Client("Connection refused (os error 111)"),
        Client("CannotConnect: Worker generate() failed before response stream"),
        Client("Disconnected: Stream ended before generation completed", chunks=0, late=True),
        Client(None, chunks=0),
    ],
)
async def test_what_could_not_be_reached_is_told_apart(client: Client) -> None:
    """Such a request may be tried on another worker."""
    with pytest.raises(WorkerUnreachable) as caught:
        await WorkerPool(None, client, Role.DECODE, 16, ManualClock()).send({}, WorkerKey(A, 0), None)
    assert caught.value.worker_id == A


async def test_other_errors_stay_what_they_are() -> None:
    """An engine's own error would happen on any worker."""
    with pytest.raises(Exception, match="max_output_tokens"):
        await WorkerPool(
            None, Client("max_output_tokens must be specified"), Role.DECODE, 16, ManualClock()
        ).send({}, WorkerKey(A, 0), None)


class Watch:
    """An endpoint with workers of given block sizes."""

    def __init__(self, block_sizes: dict[int, int]) -> None:
        self.block_sizes = block_sizes
        self.asked: list[set[int]] = []

    def instance_ids(self) -> set[int]:
        return set(self.block_sizes)

    def cards_of(self, unread: set[int]) -> dict[int, str]:
        self.asked.append(unread)
        card = {"worker_type": "decode", "display_name": "m"}
        return {w: json.dumps({**card, "kv_cache_block_size": self.block_sizes[w]}) for w in unread}

    def host(self, worker_id: int) -> str:
        return f"10.0.0.{worker_id}"


def directory_of(watch: Watch) -> WorkerDirectory:
    directory = WorkerDirectory(None, {}, ManualClock(), block_size=16)
    directory._watches = [watch]  # type: ignore[list-item]
    return directory


def test_a_worker_with_another_block_size_is_refused_once_naming_both_sizes() -> None:
    """Overlap would always be zero without an error. Source: case E6, measured."""
    directory = directory_of(Watch({1: 16, 2: 64}))
    with capture_logs() as logs:
        directory.refresh()
        directory.refresh()
    assert [(card.worker_id, card.host) for card in directory.cards()] == [(1, "10.0.0.1")]
    assert directory.count(Role.DECODE) == 1
    assert directory.refused(2)
    assert not directory.refused(1)
    assert [(line["worker_id"], line["error"]) for line in logs] == [
        ("2", "its KV block size is 64, Common.block_size = 16")
    ]


def test_cards_are_asked_for_only_while_some_worker_is_unread() -> None:
    """Asking costs a copy of every forward-pass message; a worker that leaves is gone at once."""
    watch = Watch({1: 16})
    directory = directory_of(watch)
    directory.refresh()
    directory.refresh()
    watch.block_sizes[3] = 16
    directory.refresh()
    assert watch.asked == [{1}, set(), {3}]
    del watch.block_sizes[1]
    directory.refresh()
    assert [card.worker_id for card in directory.cards()] == [3]
    assert directory.card(1) is None


def test_ranks_are_the_same_object_until_a_worker_comes_or_leaves() -> None:
    """Case R2(b), found live: a worker that came after the first look was never a candidate."""
    watch = Watch({1: 16})
    directory = directory_of(watch)
    directory.refresh()
    first = directory.ranks(Role.DECODE)
    directory.refresh()
    assert directory.ranks(Role.DECODE) is first
    watch.block_sizes[3] = 16
    directory.refresh()
    assert [key.worker_id for key, _ in directory.ranks(Role.DECODE)] == [1, 3]
    del watch.block_sizes[1]
    directory.refresh()
    assert [key.worker_id for key, _ in directory.ranks(Role.DECODE)] == [3]


class Instances:
    """Dynamo's client of an endpoint, as far as it lists who is there."""

    def __init__(self, addresses: dict[int, str], kind: str = "tcp") -> None:
        self.addresses, self.asked, self._kind = addresses, 0, kind

    def instances(self) -> list[Any]:
        self.asked += 1
        return [
            SimpleNamespace(instance_id=w, transport=SimpleNamespace(kind=self._kind, address=address))
            for w, address in self.addresses.items()
        ]


@pytest.mark.parametrize(
    ("address", "kind", "host"),
    [(f"10.0.0.1:80/{A:x}/generate", "tcp", "10.0.0.1"), ("10.0.0.1", "tcp", ""), ("subject", "nats", "")],
)
def test_a_worker_is_on_the_host_that_its_address_names(address: str, kind: str, host: str) -> None:
    """Workers of one host share a node; one whose host discovery does not tell is alone on its own."""
    watch = _Watch(None, Instances({A: address}, kind))
    assert watch.host(A) == host
    assert watch.host(A + 1) == ""


async def test_a_workers_address_is_remembered_and_read_again_now_and_then() -> None:
    """Once for a worker that is new, else four times a second: requests do not pay for the size of a pool."""
    client, clock = Instances({A: f"10.0.0.1:80/{A:x}/generate"}), ManualClock()
    pool = WorkerPool(None, client, Role.DECODE, 16, clock)
    assert pool.address(A) == Address("10.0.0.1", 80, f"{A:x}/generate")
    assert (pool.address(A), client.asked) == (Address("10.0.0.1", 80, f"{A:x}/generate"), 1)
    client.addresses[5] = "[::1]:81/5/generate"
    assert (pool.address(5), client.asked) == (Address("::1", 81, "5/generate"), 2)
    assert (pool.address(6), client.asked) == (None, 3)
    client.addresses = {5: "[::1]:82/5/generate"}
    assert pool.address(A) is not None
    await clock.advance(0.25)
    assert (pool.address(5), client.asked) == (Address("::1", 82, "5/generate"), 4)
    assert pool.address(A) is None
    assert pool.addresses() == [Address("::1", 82, "5/generate")]


def test_a_worker_without_a_usable_address_has_none_and_is_named_once() -> None:
    """It can still be reached through Dynamo's own client; another transport is nothing to complain of."""
    pool = WorkerPool(None, Instances({7: "nonsense"}), Role.DECODE, 16, ManualClock())
    with capture_logs() as logs:
        assert (pool.address(7), pool.address(7)) == (None, None)
        other = Instances({7: "poa.generate-7"}, kind="nats")
        assert WorkerPool(None, other, Role.DECODE, 16, ManualClock()).address(7) is None
    assert [(line["event"], line["worker_id"]) for line in logs] == [("poa.address.refused", "7")]


@pytest.mark.parametrize("discovery", ["file", "etcd", "etcd://etcd:2379"])
def test_on_a_tested_release_and_rewritable_discovery_nothing_lacks(discovery: str) -> None:
    """`auto` and `relay` then mean the relay, `stream` never does."""
    assert [relay_lack(discovery, version) for version in ("1.4.2", "1.6.1")] == ["", ""]
    paths = {path: use_relay(RouterConfig(data_path=path), "") for path in ("auto", "relay", "stream")}
    assert paths == {"auto": True, "relay": True, "stream": False}


@pytest.mark.parametrize(
    ("arguments", "lack"),
    [
        (("file", "1.5.0"), "ai-dynamo 1.5.0 is not among the releases the relay is tested on: 1.4.2, 1.6.1"),
        (("kubernetes", "1.4.2"), "an instance's address cannot be rewritten in discovery kubernetes"),
        (("file", "1.4.2", "nats"), "the relay speaks the tcp request plane, not nats"),
    ],
)
def test_what_lacks_is_said_and_only_auto_goes_without(arguments: tuple[str, ...], lack: str) -> None:
    """Who asks for the relay by name is told that it cannot be had, with key, value and reason."""
    assert relay_lack(*arguments) == lack
    with capture_logs() as logs:
        assert use_relay(RouterConfig(), lack) is False
        assert use_relay(RouterConfig(data_path="stream"), lack) is False
    assert [(line["data_path"], line["reason"]) for line in logs] == [("stream", lack)]
    with pytest.raises(ConfigError) as caught:
        use_relay(RouterConfig(data_path="relay"), lack)
    assert caught.value.problems == (f"PoaRouter.data_path = 'relay': {lack}",)


def test_the_release_that_is_installed_is_known() -> None:
    """It decides whether the relay may be used."""
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", dynamo_version())
