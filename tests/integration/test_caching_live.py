"""The caching game on live graphs: priced, and absent with a reason when there is nothing to price (E6)."""

from typing import Any

import pytest
from live_graph import LiveGraph, live_graph

from dynamo_poa import placement
from dynamo_poa.telemetry import TelemetryRecord

pytestmark = pytest.mark.dynamo

LOOKS = ("PoaController.games_s=0.5", "PoaController.caching.demand_window_s=5")
# 12 prefixes of 16 blocks are asked for, of two caches of 96.
LOAD: dict[str, Any] = {"prompt_tokens": 320, "max_tokens": 4, "templates": 12, "shared_frac": 0.8}
SMALL = "{speedup-ratio: 5, num-gpu-blocks-override: 96}"


def priced(record: TelemetryRecord) -> bool:
    """Tell whether there is a figure, of both workers."""
    return record.caching.poa_hat is not None and record.caching.workers == 2


def shared(record: TelemetryRecord) -> bool:
    """Tell whether there is a figure, and both caches hold some of the same blocks."""
    return priced(record) and (record.caching.duplication or 0.0) > 1


async def test_caches_of_a_live_graph_are_priced_and_a_worker_that_is_away_takes_the_figure_with_it() -> None:
    """Issue 7: present with caches; with one worker there is a reason and no figure, until it is back."""
    overrides = (
        "PrefillWorker.workers=2",
        "PrefillWorker.per_process=1",
        f"PrefillWorker.args={SMALL}",
        "DecodeWorker.workers=2",
        "DecodeWorker.per_process=2",
        "DecodeWorker.args={speedup-ratio: 5, num-gpu-blocks-override: 2048}",
        "PoaRouter.min_prefill_workers=2",
        "PoaRouter.min_decode_workers=2",
        "PoaController.mode='off'",
        "PoaRouter.overlap_weight=0",  # so that both caches hold the same prefixes
        *LOOKS,
    )
    async with live_graph("disagg", *overrides, clean=False) as graph, graph.load(8, **LOAD):
        seen = len(graph.telemetry)
        # Caches of a few prefixes each hold different ones now and then.
        await graph.until(lambda record: shared(record) and record.caching.reload_frac is not None, 20)
        found = next(
            r for r in graph.telemetry[seen:] if shared(r) and r.caching.reload_frac is not None
        ).caching
        assert found.poa_hat is not None
        assert found.poa_hat >= 1 - 1e-9
        assert found.observed_s == pytest.approx(found.poa_hat * (found.optimal_s or 0.0))
        assert (found.method, found.uncertain) == ("exact", False)
        assert 2 <= found.groups <= 12
        assert (found.duplication or 0.0) <= 2
        assert found.sampled_frac == 1.0
        await shown(graph)
        async with graph.held_down("prefill-1"):
            await graph.until(lambda record: record.caching.reason == placement.ONE_WORKER, 15)
            assert graph.latest.caching.poa_hat is None
            assert "poa_caching_hat" not in await graph.metrics("controller")
        await graph.until(priced, 30)


async def shown(graph: LiveGraph) -> None:
    """Wait until /metrics has the figure; workers that share a host are on one node, so copies count."""
    samples = await graph.metrics_until(
        "controller",
        lambda samples: "poa_caching_hat" in samples and samples["poa_caching_copies_frac"] > 0,
        within_s=15,
    )
    assert 2 <= samples["poa_caching_groups"] <= 12


async def test_without_prefix_caching_there_is_a_reason_and_no_figure() -> None:
    """Case E6 (d): the prompts share, the engines keep nothing."""
    overrides = (
        "Worker.workers=2",
        "Worker.per_process=2",
        "Worker.args={speedup-ratio: 5, num-gpu-blocks-override: 2048, no-enable-prefix-caching: true}",
        *LOOKS,
    )
    async with live_graph("agg", *overrides) as graph:
        async with graph.load(8, **LOAD):
            await graph.until(lambda record: record.caching.reason == placement.NO_BLOCKS, 15)
            await graph.until(lambda record: (record.arrival_rate or 0.0) > 0, 15)
            seen = len(graph.telemetry)
            await graph.until(lambda record: len(graph.telemetry) > seen + 20, 15)
        after = graph.telemetry[seen:]
        assert {record.caching.reason for record in after} == {placement.NO_BLOCKS}
        assert {(record.caching.poa_hat, record.caching.duplication) for record in after} == {(None, None)}
