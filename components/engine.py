"""Decides what an engine's file is told about one worker process and what it must answer.

Owns: the two values that pass between a pool (worker.py) and the engines.
Does not own: any flag.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_poa.values import Role


class WorkerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a pool, as every engine needs to know it.

    endpoint:   address to serve, `dyn://namespace.component.generate`
    workers:    workers in this process; 1 for real engines
    bootstrap:  prefill and decode workers meet through an address of the prefill worker's
    ports:      hands out the first of so many consecutive free ports
    """

    role: Role
    endpoint: str
    model_path: str
    model_name: str
    block_size: int
    workers: int
    bootstrap: bool
    ports: Callable[[int], int]

    @property
    def publishes_kv_events(self) -> bool:
        """Tell whether routing wants its cache events: decode workers' are ignored by Dynamo's router."""
        return self.role is not Role.DECODE


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Flags, without the dashes, and environment; what the user gives under `args` and `env` is added."""

    arguments: dict[str, Any]
    env: dict[str, str] = {}
