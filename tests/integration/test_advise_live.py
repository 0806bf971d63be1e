"""The split of a running graph: priced beside the ticks, told by `dynamo-poa advise`."""

import asyncio
import sys

import pytest
from live_graph import DISAGG_2P3D, live_graph

from dynamo_poa.coupling import Split

pytestmark = pytest.mark.dynamo
PROGRAM = (sys.executable, "-c", "from dynamo_poa.serve.cli import main; main()")


async def test_the_split_of_a_running_graph_is_priced_and_told() -> None:
    """Light load on 2P/3D: every split that is priced does well, so it is left alone, with its figures."""
    async with live_graph("disagg", *DISAGG_2P3D) as graph:
        assert graph.latest.allocation.now is None
        async with graph.load(4, prompt_tokens=256, max_tokens=16):
            await graph.until(lambda record: record.allocation.now is not None, within_s=60.0)
        record = graph.latest
        found = record.allocation
        assert found.now is not None
        assert found.best is not None
        assert found.poa_hat is not None
        assert found.now.split == Split(2, 3)
        assert 1.0 <= found.poa_hat < 1.05
        assert found.now.goodput_rps > 1.0
        assert (record.poa_advice, record.failed_ticks) == (None, 0)
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            *("advise", "--nats", graph.bus.url, "--namespace", graph.namespace),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        said = out.decode().splitlines()
        assert said[0].startswith(f"namespace {graph.namespace} at nats://127.0.0.1:")
        assert said[1].startswith("leave the split 2P/3D")
