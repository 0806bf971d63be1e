"""What a router process shows of itself on /metrics.

Owns: metric names of the router; reading them at the moment of the scrape, so the request path pays nothing.
Does not own: the HTTP server (telemetry.py) or the counts (trip.py, reporter.py, params.py).
"""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_poa.bus import Bus
from dynamo_poa.coefficients import CoefficientsHolder
from dynamo_poa.data_path import RelayPath
from dynamo_poa.neighbours import Neighbours
from dynamo_poa.params import ParamsHolder
from dynamo_poa.reporter import DecisionReporter
from dynamo_poa.trip import RouterStats


class RouterMetrics(Collector):
    """Collects on demand.

    registered:  what /health answers with
    path:        the relay's, if any
    neighbours:  the other routers, where there are any
    """

    def __init__(
        self,
        stats: RouterStats,
        holder: ParamsHolder,
        reporter: DecisionReporter,
        bus: Bus,
        coefficients: CoefficientsHolder,
    ) -> None:
        self._stats, self._holder, self._reporter, self._bus = stats, holder, reporter, bus
        self._coefficients = coefficients
        self.registered = False
        self.path: RelayPath | None = None
        self.neighbours: Neighbours | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all families. In the event loop's thread, as the scrape is."""
        current = self._holder.current
        for name, value, doc in (
            ("router_temperature", current.router_temperature, "τ requests are routed with now"),
            ("overlap_weight", current.overlap_weight, "ω requests are routed with now"),
            ("params_revision", current.revision, "revision of these parameters, 0 for the static ones"),
            ("loop_lag_seconds", self._reporter.loop_lag_s, "delay of the event loop in the last period"),
            ("bus_connected", float(self._bus.connected), "1 while NATS is connected"),
            ("tasks", float(len(asyncio.all_tasks())), "tasks of the event loop"),
            ("registered", float(self.registered), "1 while the frontend can see this router"),
        ):
            yield GaugeMetricFamily(f"poa_router_{name}", doc, value=value)
        in_flight = GaugeMetricFamily(
            "poa_router_in_flight_requests", "requests being served", labels=["role"]
        )
        for role, count in self._stats.in_flight.items():
            in_flight.add_metric([role], count)
        yield in_flight
        ended = CounterMetricFamily("poa_router_requests", "requests that ended", labels=["role", "outcome"])
        for (role, outcome), count in self._stats.ended.items():
            ended.add_metric([role, outcome], count)
        yield ended
        retries = CounterMetricFamily("poa_router_retries", "sent to a second worker", labels=["role"])
        for role, count in self._stats.retries.items():
            retries.add_metric([role], count)
        yield retries
        refused = CounterMetricFamily("poa_router_params_refused", "refused records", labels=["reason"])
        for reason, count in self._holder.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield from self._marginal()
        for name, count, doc in (
            ("decision_events_sent", self._reporter.sent, "decision events sent to the controller"),
            ("decision_events_dropped", self._reporter.dropped, "decision events lost to a full queue"),
            (
                "prompts_unhashed",
                self._stats.unhashed,
                "sampled decisions told without the prompt's prefix: Dynamo did not hash it",
            ),
            ("bus_reconnects", self._bus.reconnects, "reconnects to NATS"),
        ):
            yield CounterMetricFamily(f"poa_router_{name}", doc, value=count)
        yield from self._relay()

    def _marginal(self) -> Iterator[Metric]:
        marginal = CounterMetricFamily(
            "poa_router_marginal",
            "requests to be picked a worker for by marginal cost: picked, or why Dynamo's selection had them",
            labels=["outcome"],
        )
        for outcome, count in self._stats.marginal.items():
            marginal.add_metric([outcome], count)
        yield marginal
        yield CounterMetricFamily(
            "poa_router_marginal_untold", "of those, unknown to Dynamo's router as load", self._stats.untold
        )
        refused = CounterMetricFamily(
            "poa_router_coefficients_refused", "refused messages of coefficients", labels=["reason"]
        )
        for reason, count in self._coefficients.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            "poa_router_coefficients_revision",
            "revision of the last good coefficients, 0 before the first",
            value=self._coefficients.revision or 0,
        )
        if self.neighbours is not None:
            yield GaugeMetricFamily(
                "poa_router_neighbours", "other routers heard of late", value=self.neighbours.count
            )
            unheard = CounterMetricFamily(
                "poa_router_neighbours_refused", "refused words of other routers", labels=["reason"]
            )
            for reason, count in self.neighbours.refused.items():
                unheard.add_metric([reason], count)
            yield unheard

    def _relay(self) -> Iterator[Metric]:
        path = self.path
        relayed = path is not None and path.in_force
        yield GaugeMetricFamily(
            "poa_router_relay_in_force",
            "1 while requesters are sent to the relay",
            value=relayed,
        )
        if path is None:
            return
        for name, count, doc in (
            ("requests", path.relay.forwarded, "requests taken over by the relay"),
            ("frames_lost", path.relay.lost, "frames handed on that no endpoint took"),
            ("dialled_in_vain", path.answers.turned_away, "workers' answers that nobody waited for any more"),
        ):
            yield CounterMetricFamily(f"poa_router_relay_{name}", doc, value=count)
        handed_on = CounterMetricFamily(
            "poa_router_relay_handed_on", "frames handed to Dynamo's own endpoint", labels=["reason"]
        )
        for reason, count in path.relay.handed_on.items():
            handed_on.add_metric([reason], count)
        yield handed_on
        connections = GaugeMetricFamily("poa_router_relay_connections", "open connections", labels=["of"])
        for of, count in (
            ("requests", path.relay.connections),
            ("answers", path.answers.open),
            ("workers", path.workers.open),
        ):
            connections.add_metric([of], count)
        yield connections
