"""Decides what a graph is: components, the links between them, and what each may say about its processes.

Owns: `Component` and its `link`, the values a component's command lines are made from and of, loading a graph
      by name.
Does not own: configuration values (resolve.py), which process gets what (plan.py), running them
      (supervisor.py), and any component: those live in `components/`, one file each.
Invariant: importing a graph starts nothing and imports neither Dynamo nor NATS; a link belongs to the graph
           module that draws it, so two graphs may link the same component differently.
Source: Dynamo's SDK up to 0.3: `Frontend.link(Processor).link(Worker)`, served as `graphs.name:Frontend`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from dynamo_poa.config import CommonConfig, Section
from dynamo_poa.errors import ConfigError
from dynamo_poa.values import Role


class Stage(IntEnum):
    """When a process starts; stopping goes the other way."""

    NATS = 0
    WORKERS = 1
    ROUTERS = 2
    CONTROLLER = 3
    FRONTEND = 4


class NatsReady(msgspec.Struct, frozen=True):
    """Ready when a NATS server greets at this URL."""

    url: str


class Registered(msgspec.Struct, frozen=True):
    """Ready when discovery lists so many instances of the endpoint, `namespace.component.endpoint`."""

    endpoint: str
    instances: int


class HttpOk(msgspec.Struct, frozen=True):
    """Ready when GET answers 200."""

    url: str


class ModelListed(msgspec.Struct, frozen=True):
    """Ready when the frontend lists the model."""

    url: str
    model: str


Probe = NatsReady | Registered | HttpOk | ModelListed


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a graph.

    env:    what it gets beyond the environment all processes of the graph share
    ready:  how to tell that it is up
    """

    name: str
    stage: Stage
    argv: tuple[str, ...]
    ready: Probe
    env: dict[str, str] = {}


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What a component may need beside its own section to write its command lines.

    common:      `nats_url` and `model_path` are already what the processes must use
    config_path: the resolved configuration of the whole graph, for our own processes' `--config`
    exposed:     roles whose workers the frontend sees directly, because no router stands before them
    bootstrap:   whether prefill and decode workers meet by bootstrap rather than one after the other
    ports:       hands out the first of so many consecutive free ports
    """

    common: CommonConfig
    config_path: Path
    exposed: frozenset[Role] = frozenset()
    bootstrap: bool = False
    ports: Callable[[int], int]

    def python(self, module: str, *arguments: object) -> tuple[str, ...]:
        """Return the command line that runs a module; `-P` keeps the current directory out of its imports."""
        return (sys.executable, "-P", "-m", module, *map(str, arguments))

    def endpoint(self, role: Role) -> str:
        """Return the endpoint workers of this role serve, `namespace.component.endpoint`."""
        # exposed workers stand where the router would
        return (
            self.common.router_endpoint(role) if role in self.exposed else self.common.worker_endpoint(role)
        )


class Component:
    """A part of a graph: a name, a section of the configuration, and how its processes are started.

    name:       also the name of its section in the YAML file
    section:    the Struct its section is read into
    processes:  `(section, site) -> list[Process]`, pure; called once the whole configuration is valid
    role:       for pools of workers, whose leg they serve
    problems:   `(section) -> list[str]`, what bounds alone cannot say; each names key, value and rule

    A component with one process, in a module of ours:

        Thing = Component("Thing", ThingConfig, lambda config, site: [
            Process(name="thing", stage=Stage.CONTROLLER,
                    argv=site.python("components.thing", "--config", site.config_path),
                    ready=HttpOk(f"http://127.0.0.1:{config.metrics_port}/health"))])
    """

    def __init__(
        self,
        name: str,
        section: type[Section],
        processes: Callable[[Any, Site], list[Process]],
        role: Role | None = None,
        problems: Callable[[Any], list[str]] = lambda section: [],
    ) -> None:
        self.name, self.section, self.processes = name, section, processes
        self.role, self.problems = role, problems
        self._links: dict[str, list[Component]] = {}

    def link(self, other: "Component") -> "Component":
        """Draw an edge from this component to `other` in the calling module's graph; return `other`."""
        drawn = self._links.setdefault(sys._getframe(1).f_globals["__name__"], [])
        if other not in drawn:
            drawn.append(other)
        return other

    def linked(self, module: str) -> tuple["Component", ...]:
        """Return what the graph module `module` links this component to, in the order drawn."""
        return tuple(self._links.get(module, ()))

    def __repr__(self) -> str:
        """Return the name: that is what a person needs to see."""
        return f"Component({self.name})"


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded graph: every component reachable from its root, each once, in the order met."""

    target: str
    components: tuple[Component, ...]

    def roles(self) -> frozenset[Role]:
        """Return the roles this graph has workers for."""
        return frozenset(component.role for component in self.components if component.role is not None)


def load_graph(target: str) -> Graph:
    """Import a graph given as `module:Component` and collect what it links.

    Raises:  ConfigError when there is no such module, no such component, or a module does not import.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError([f"graph {target!r}: must be module:Component, such as graphs.disagg_poa:Frontend"])
    module = _import(module_name)
    root = getattr(module, attribute, None)
    if not isinstance(root, Component):
        names = [name for name, value in vars(module).items() if isinstance(value, Component)]
        known = ", ".join(names) or "none"
        raise ConfigError([f"graph {target!r}: {module_name} has no component {attribute}; it has: {known}"])
    found = [root]
    for component in found:  # grows while it is walked: breadth first
        found += [other for other in component.linked(module_name) if other not in found]
    return Graph(target=target, components=tuple(found))


def _import(name: str) -> Any:
    """Import a graph module: an installed one first, then one below the current directory."""
    missing = f"graph module {name!r} does not exist, neither installed nor in {Path.cwd()}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError([f"graph module {name!r} does not import: {error}"]) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError([f"graph module {name!r} does not import: {error}"]) from error
    path = Path.cwd().joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError([missing])
    sys.path.append(str(Path.cwd()))  # its own components stand beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[name]
        raise ConfigError([f"graph module {name!r} does not import: {error}"]) from error
    return module
