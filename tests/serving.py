"""Stand-ins for the serving tests: a router and a controller that are only declared, and ports in a row."""

from dynamo_poa.config import ControllerConfig, RouterConfig
from dynamo_poa.serve.graph import Component, Graph, HttpOk, Process, Site, Stage


class Ports:
    """Hands out 21000, 21001, ... so that plans can be compared exactly."""

    def __init__(self, first: int = 21_000) -> None:
        self._next = first

    def __call__(self, count: int) -> int:
        first = self._next
        self._next += count
        return first


def _router_processes(config: RouterConfig, site: Site) -> list[Process]:
    return [
        Process(
            name=f"router-{replica}",
            stage=Stage.ROUTERS,
            argv=site.python("router", "--config", site.config_path, "--replica", replica),
            ready=HttpOk(f"http://127.0.0.1:{config.metrics_port + replica}/health"),
        )
        for replica in range(config.replicas)
    ]


def _controller_processes(config: ControllerConfig, site: Site) -> list[Process]:
    return [
        Process(
            name="controller",
            stage=Stage.CONTROLLER,
            argv=site.python("controller", "--config", site.config_path),
            ready=HttpOk(f"http://127.0.0.1:{config.metrics_port}/health"),
        )
    ]


Router = Component("PoaRouter", RouterConfig, _router_processes)
Controller = Component("PoaController", ControllerConfig, _controller_processes)


def graph_of(*components: Component) -> Graph:
    """Return a graph of these components without a module that draws it."""
    return Graph(target="graphs.test:Frontend", components=components)
