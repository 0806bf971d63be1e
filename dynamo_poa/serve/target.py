"""Which NATS server and namespace a command talks to.

Owns: the order of precedence between options, environment and running graphs; asking the controller.
Does not own: where running graphs are noted (rundir.py), what is asked (commands.py).
Invariant: never a guess: one running graph is taken, several or none are an error that says what to name.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from dynamo_poa.bus import Bus
from dynamo_poa.clock import SystemClock
from dynamo_poa.config import CommonConfig
from dynamo_poa.errors import BusError, ConfigError, NoResponders
from dynamo_poa.serve.rundir import RunningGraph, find_running
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.wire import subject

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 2.0


class Target(NamedTuple):
    """A graph, as far as it can be reached: through its NATS, under its namespace.

    graph:  what is known of it, None where this user does not run it
    """

    nats_url: str
    namespace: str
    graph: RunningGraph | None = None

    def told(self, shown_url: str) -> str:
        """Return in words which graph this is. `shown_url` is its NATS without a password."""
        known = f", {self.graph.http_url}, pid {self.graph.pid}" if self.graph else ""
        return f"namespace {self.namespace} at {shown_url}{known}"


def find_target(nats_url: str | None, namespace: str | None) -> Target:
    """Return what the options name, filled in from this user's running graphs.

    Raises:  ConfigError when no graph or several fit, saying how to name one.
    """
    if namespace is not None:
        CommonConfig(namespace=namespace)  # refuses what is not one token of a subject
    graphs = [graph for graph in find_running(namespace) if nats_url in (None, graph.nats_url)]
    if nats_url is not None and (namespace is not None or not graphs):
        known = graphs[0] if len(graphs) == 1 else None
        return Target(nats_url, namespace or CommonConfig().namespace, known)
    if len(graphs) == 1:
        return Target(graphs[0].nats_url, graphs[0].namespace, graphs[0])
    if graphs:
        raise ConfigError(
            ["several graphs are running: name one with --namespace or --nats", *_listed(graphs)]
        )
    under = "" if namespace is None else f" in namespace {namespace}"
    raise ConfigError([f"no graph of this user is running{under}: name one with --nats URL --namespace NAME"])


def _listed(graphs: list[RunningGraph]) -> list[str]:
    return [
        f"  --namespace {graph.namespace} --nats {graph.nats_url}  "
        f"({graph.target} at {graph.http_url}, pid {graph.pid})"
        for graph in graphs
    ]


@asynccontextmanager
async def connected(target: Target, name: str) -> AsyncIterator[Bus]:
    """Connect to the target's NATS.

    Raises:  BusError naming the server when it does not answer.
    """
    async with Bus(target.nats_url, name=f"dynamo-poa {name}", clock=SystemClock()) as bus:
        await bus.wait_connected(CONNECT_TIMEOUT_S)
        yield bus


async def ask(bus: Bus, namespace: str, request: dict[str, Any]) -> TelemetryRecord:
    """Return the controller's record in answer to a request on the control subject.

    Raises:  BusError when there is no answer, ConfigError with the controller's words when it refuses.
    """
    where = subject(namespace, "control")
    try:
        data = await bus.request(where, msgspec.json.encode(request), ANSWER_TIMEOUT_S)
    except NoResponders as error:
        raise BusError(f"no controller answers in namespace {namespace} at {bus.url}") from error
    try:
        answer = msgspec.json.decode(data, type=dict[str, Any])
        if answer.get("ok") is False:
            raise ConfigError([f"the controller refuses: {answer.get('error')}"])
        return msgspec.convert(answer, TelemetryRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BusError(f"the answer on {where} is not this version's: {error}") from error
