"""A controller that joins late asks real workers what their caches hold, and then knows them exactly."""

import pytest
from live_graph import AGG_3, LiveGraph, live_graph
from waiting import eventually

from dynamo_poa.wire import KV_EVENTS, KvStored, decode_dynamo

pytestmark = pytest.mark.dynamo


class Stored:
    """How many blocks each worker says it has stored; none is evicted here."""

    def __init__(self, graph: LiveGraph) -> None:
        self.blocks: dict[int, set[int]] = {}
        subject = f"namespace.{graph.namespace}-workers.component.*.endpoint.generate.{KV_EVENTS}"
        graph.bus.subscribe(subject, self._on_events)

    def _on_events(self, topic_subject: str, data: bytes) -> None:
        body = decode_dynamo(topic_subject, data).body
        assert isinstance(body, tuple)
        for event in body:
            assert isinstance(event.data, KvStored)
            self.blocks.setdefault(event.worker_id, set()).update(event.data.block_hashes)

    def counts(self) -> list[int]:
        """Return them, sorted: metrics name workers in their own way."""
        return sorted(len(held) for held in self.blocks.values())


def of(samples: dict[str, float], name: str) -> list[float]:
    """Return one metric's values over the workers, sorted."""
    return sorted(value for key, value in samples.items() if key.startswith(f"poa_worker_{name}{{"))


async def test_a_restarted_controller_knows_caches_that_were_filled_before_it_began() -> None:
    """Issue: re-synchronise where events were missed; until then the mirror says that it is approximate."""
    async with live_graph("agg", *AGG_3, clean=False) as graph:
        stored = Stored(graph)
        assert all(result.ok for result in await graph.many(12, 3, prompt_tokens=160))
        await graph.idle()
        await graph.metrics_until(
            "controller", lambda samples: of(samples, "resident_blocks") == stored.counts()
        )
        assert len(stored.blocks) == 3
        beats = len(graph.heartbeats)
        async with graph.held_down("controller"):
            assert all(result.ok for result in await graph.many(12, 3, prompt_tokens=176))
        await eventually(lambda: len(graph.heartbeats) > beats, 15)
        # Whoever speaks of its cache now has said something before: its events do not begin with 1.
        assert all(result.ok for result in await graph.many(13, 3, prompt_tokens=192))
        await graph.idle()
        samples = await graph.metrics_until(
            "controller",
            lambda samples: of(samples, "resident_approximate") == [0.0, 0.0, 0.0],
            within_s=10,
        )
        assert of(samples, "resident_blocks") == stored.counts()
        asked = [line for process, line in graph.lines if process == "controller" and "caches.asked" in line]
        assert len(asked) >= 1
