"""What a router's /metrics say of requests that are to go by marginal cost."""

from types import SimpleNamespace
from typing import Any

import msgspec
from exposition import samples_of
from prometheus_client import generate_latest

from dynamo_poa.clock import ManualClock
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.ledger import Ledger
from dynamo_poa.neighbours import SILENT_S, Neighbours
from dynamo_poa.router_metrics import RouterMetrics
from dynamo_poa.trip import RouterStats
from dynamo_poa.values import Curve, Role
from dynamo_poa.wire import Coefficients, DecisionBatch, PoolSpeed


class World:
    """The metrics of a router on fakes."""

    def __init__(self) -> None:
        self.clock, self.stats = ManualClock(), RouterStats()
        self.holder = CoefficientsHolder(self.clock.monotonic_s)
        params: Any = SimpleNamespace(
            current=SimpleNamespace(router_temperature=0.0, overlap_weight=1.0, revision=0), refused={}
        )
        reporter: Any = SimpleNamespace(loop_lag_s=0.0, sent=0, dropped=0)
        self.bus: Any = SimpleNamespace(connected=True, reconnects=0)
        self.metrics = RouterMetrics(self.stats, params, reporter, self.bus, self.holder)

    def shown(self, *names: str) -> dict[str, float]:
        samples = samples_of(generate_latest(self.metrics.registry).decode())
        return {name: value for name, value in samples.items() if name.startswith(names)}


async def test_each_reason_not_to_pick_is_told_apart() -> None:
    """Contract: picked, or why Dynamo's selection had the request; and the coefficients that were refused."""
    world = World()
    names = ("poa_router_marginal", "poa_router_coefficients")
    assert world.shown(*names) == {
        "poa_router_marginal_untold_total": 0,
        "poa_router_coefficients_revision": 0,
    }
    world.stats.marginal.update(["picked", "picked", "stale_coefficients"])
    world.stats.untold = 1
    good = Coefficients(
        controller_id="c", revision=5, sent_at_s=0.0, pools={Role.DECODE: PoolSpeed(curve=Curve())}
    )
    for data in (msgspec.msgpack.encode(good), msgspec.msgpack.encode(good), b"\xc1"):
        world.holder.offer_bytes(data)
    assert world.shown(*names) == {
        'poa_router_marginal_total{outcome="picked"}': 2,
        'poa_router_marginal_total{outcome="stale_coefficients"}': 1,
        "poa_router_marginal_untold_total": 1,
        'poa_router_coefficients_refused_total{reason="stale_revision"}': 1,
        'poa_router_coefficients_refused_total{reason="not_msgpack"}': 1,
        "poa_router_coefficients_revision": 5,
    }


async def test_other_routers_are_counted_where_there_are_any() -> None:
    """Heard of late, and what of their words was refused; the only router has none to speak of."""
    world = World()
    assert world.shown("poa_router_neighbours") == {}
    ledgers = {Role.DECODE: Ledger(Role.DECODE, world.clock)}
    neighbours = Neighbours(world.bus, "ns", "me", ledgers, world.holder, world.clock)
    world.metrics.neighbours = neighbours
    batch = DecisionBatch(router_id="r2", sequence=1, sent_at_s=0.0)
    for data in (msgspec.msgpack.encode(batch), b"\xc1"):
        neighbours.receive(data)
    assert world.shown("poa_router_neighbours") == {
        "poa_router_neighbours": 1,
        'poa_router_neighbours_refused_total{reason="not_msgpack"}': 1,
    }
    await world.clock.advance(SILENT_S)
    assert world.shown("poa_router_neighbours")["poa_router_neighbours"] == 0
