"""Waiting for a condition in tests that run real processes."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], within_s: float = 5.0) -> float:
    """Return the seconds it took until `condition` held; fail when it does not in time."""
    started_s = time.monotonic()
    while not condition():
        elapsed_s = time.monotonic() - started_s
        assert elapsed_s < within_s, f"not within {within_s:g} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - started_s
