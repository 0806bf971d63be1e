"""Routers and caches call a prefix the same, on real Dynamo: what Γ_KV is priced on."""

import pytest
from live_graph import DISAGG_2P3D, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.bench.load import Prompt
from dynamo_poa.prefixes import roll
from dynamo_poa.values import Role, WorkerKey
from dynamo_poa.wire import KV_EVENTS, Chosen, KvStored, decode_dynamo

pytestmark = pytest.mark.dynamo


class Stored:
    """The blocks that workers say they stored, by what they roll up to."""

    def __init__(self, graph: LiveGraph) -> None:
        self._chains: dict[tuple[WorkerKey, int], int] = {}
        subject = f"namespace.{graph.namespace}-workers.component.*.endpoint.generate.{KV_EVENTS}"
        graph.bus.subscribe(subject, self._on_events)

    def at(self, event: Chosen) -> set[int]:
        """Return the prefixes held by the worker that a decision chose."""
        key = WorkerKey(event.worker_id, event.dp_rank)
        return {chain for (holder, _), chain in self._chains.items() if holder == key}

    def _on_events(self, topic_subject: str, data: bytes) -> None:
        body = decode_dynamo(topic_subject, data).body
        assert isinstance(body, tuple)
        for event in body:
            if isinstance(event.data, KvStored):
                key, parent = WorkerKey(event.worker_id, event.dp_rank), event.data.parent_hash
                chain = None if parent is None else self._chains[key, parent]
                blocks = zip(event.data.block_hashes, event.data.tokens_hashes, strict=True)
                for block_hash, tokens_hash in blocks:
                    chain = self._chains[key, block_hash] = roll(chain, tokens_hash)


async def test_a_prompt_s_prefixes_are_the_ones_its_worker_stores() -> None:
    """Depths 1, 2, 4 and 8 of two prompts of 12 blocks that part after the fourth, by workers' events."""
    async with live_graph("disagg", *DISAGG_2P3D) as graph:
        stored = Stored(graph)
        shared = list(range(1000, 1064))
        for tail in (2000, 3000):
            prompt = Prompt(tuple(shared + list(range(tail, tail + 136))), 4)
            assert (await graph.complete(prompt)).ok
        await graph.decided(4)
        one, two = graph.chosen(Role.PREFILL)
        assert [len(event.prefix) for event in (one, two)] == [4, 4]
        assert one.prefix[:3] == two.prefix[:3]
        assert one.prefix[3] != two.prefix[3]
        for event in (one, two):
            await eventually(lambda event=event: stored.at(event) >= set(event.prefix))
        assert [event.prefix for event in graph.chosen(Role.DECODE)] == [(), ()]
        assert (await graph.metrics("router"))["poa_router_prompts_unhashed_total"] == 0
