"""Decides what a graph's configuration is: its YAML file, overrides from the command line, defaults.

Owns: finding and reading the file, laying overrides over it, and the rules between sections.
Does not own: bounds of single keys (config.py), whether this machine can serve it (checks.py), processes
      (plan.py).
Invariant: every problem of a configuration is reported at once, by key, value and rule; nothing is repaired.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

import graphs
from dynamo_poa.config import CommonConfig, FrontendConfig, RouterConfig, Section, WorkerConfig, read_section
from dynamo_poa.errors import ConfigError
from dynamo_poa.serve.graph import Graph
from dynamo_poa.values import Role
from dynamo_poa.yaml12 import load_yaml, syntax_problem

T = TypeVar("T", bound=Section)

MAX_PORT = 65_535
_LEGS = ({"prefill", "decode"}, {"prefill"}, {"aggregated"})


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """Every section of a graph, by name; `Common` first, then in the graph's order."""

    graph: Graph
    sections: dict[str, Section]

    def of(self, section: type[T]) -> T | None:
        """Return the one section of this type, None where the graph has no such component."""
        return next((value for value in self.sections.values() if isinstance(value, section)), None)

    @property
    def common(self) -> CommonConfig:
        """Return what all processes share."""
        common = self.sections["Common"]
        assert isinstance(common, CommonConfig)
        return common

    @property
    def routed(self) -> frozenset[Role]:
        """Return the roles whose workers stand behind the router, out of the frontend's sight."""
        router = self.of(RouterConfig)
        return frozenset(Role(leg) for leg in router.legs) if router else frozenset()

    @property
    def exposed(self) -> frozenset[Role]:
        """Return the roles whose workers the frontend sees directly."""
        return self.graph.roles() - self.routed

    @property
    def bootstrap(self) -> bool:
        """Tell whether mock workers hand over by bootstrap: the router knows how to, if it has both legs."""
        both_routed = {Role.PREFILL, Role.DECODE} <= self.routed
        return self.common.handover == "bootstrap" or (self.common.handover == "auto" and both_routed)


def find_file(name: str) -> Path:
    """Return the configuration file: as given, or among the shipped ones.

    Raises:  ConfigError when it is in neither place.
    """
    given = Path(name)
    places = [given]
    if not given.is_absolute():
        for shipped in map(Path, graphs.__path__):
            places += [shipped.parent / given, shipped / given]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise ConfigError([f"-f {name}: no such file, neither as given nor among the shipped graphs"])


def read_file(path: Path) -> dict[str, Any]:
    """Return a YAML file's sections.

    Raises:  ConfigError when it cannot be read or is not a mapping.
    """
    try:
        raw = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([syntax_problem(str(path), error)]) from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: must be a mapping of components to sections"])
    return raw


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Lay `Component.key=value` over a file's sections.

    Keys may be nested (`PoaController.regime.theta1=3`); values are YAML; leading dashes do not matter.

    Returns:  new sections, and one problem per override that cannot be understood.
    """
    sections: dict[str, Any] = msgspec.to_builtins(dict(raw))
    problems = []
    for override in overrides:
        path, separator, text = override.lstrip("-").partition("=")
        keys = path.split(".")
        if not separator and len(keys) > 1 and all(keys):
            problems.append(f"{path}: needs a value, as in --{path}=VALUE")
            continue
        if not separator or len(keys) < 2 or not all(keys):
            problems.append(f"{override!r}: unknown option; overrides read --Component.key=value")
            continue
        try:
            value = load_yaml(text)
        except (ValueError, yaml.YAMLError):
            problems.append(f"{path} = {text!r}: not a YAML value")
            continue
        section = sections
        for depth, key in enumerate(keys[:-1], start=1):
            key = _as_written(section, key)
            inner = section.get(key)
            if inner is None:
                inner = section[key] = {}
            if not isinstance(inner, dict):
                problems.append(f"{path} = {text!r}: {'.'.join(keys[:depth])} holds a value, not keys")
                break
            section = inner
        else:
            section[_as_written(section, keys[-1])] = value
    return sections, problems


def _as_written(section: Mapping[Any, Any], key: str) -> Any:
    """Return the key as the file has it: a number in YAML, as in `args_of: {3: ...}`, is text in a path."""
    return next((known for known in section if str(known) == key), key)


def configure(graph: Graph, raw: Mapping[str, Any]) -> tuple[Configuration, list[str]]:
    """Read every section of a graph.

    Returns:  the configuration, in which a section with problems is missing, and all problems found.
    """
    kinds: dict[str, type[Section]] = {"Common": CommonConfig}
    kinds |= {component.name: component.section for component in graph.components}
    problems = []
    for name, value in raw.items():
        if name not in kinds:
            near = difflib.get_close_matches(str(name), kinds, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            given = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
            problems.append(
                f"{name} ({given}): {graph.target} has no such component{hint}; it has: {', '.join(kinds)}"
            )
    sections: dict[str, Section] = {}
    for name, kind in kinds.items():
        section, found = read_section(kind, raw.get(name), name)
        problems += found
        if section is not None:
            sections[name] = section
    for component in graph.components:
        if component.name in sections:
            problems += component.problems(sections[component.name])
    configuration = Configuration(graph=graph, sections=sections)
    return configuration, problems + _problems_between(configuration)


def _problems_between(configuration: Configuration) -> list[str]:
    roles = configuration.graph.roles()
    problems = []
    if configuration.graph.components[0].section is not FrontendConfig:
        problems.append(f"graph {configuration.graph.target!r}: must name its Frontend")
    if not roles:
        problems.append(f"graph {configuration.graph.target!r}: links no workers")
    router = configuration.of(RouterConfig)
    common = configuration.sections.get("Common")
    if isinstance(common, CommonConfig):
        problems += _address_problems(common)
    if router is None or not isinstance(common, CommonConfig):
        return problems
    last_port = router.metrics_port + router.replicas - 1
    if last_port > MAX_PORT:
        problems.append(
            f"PoaRouter.metrics_port = {router.metrics_port}: the last of {router.replicas} replicas "
            f"would listen on {last_port}, must be <= {MAX_PORT}"
        )
    legs = list(router.legs)
    allowed = [sorted(choice, reverse=True) for choice in _LEGS if {Role(leg) for leg in choice} <= roles]
    if set(legs) not in [set(choice) for choice in allowed] or len(set(legs)) != len(legs):
        problems.append(
            f"PoaRouter.legs = {legs}: must be one of {', '.join(map(str, allowed))} (the graph's workers)"
        )
    if set(legs) == {"prefill"}:
        rule = "PoaRouter.legs = [prefill] needs sequential hand-over"
        if common.handover == "bootstrap":
            problems.append(f"Common.handover = 'bootstrap': {rule}")
        for name, section in configuration.sections.items():
            if isinstance(section, WorkerConfig) and section.engine == "sglang":
                problems.append(f"{name}.engine = 'sglang': {rule}, which SGLang does not do")
    return problems


def _address_problems(common: CommonConfig) -> list[str]:
    problems = []
    if common.nats_url != "embedded" and not re.fullmatch(r"(nats|tls)://[^/\s]+", common.nats_url):
        problems.append(f"Common.nats_url = {common.nats_url!r}: must be embedded or nats://host:port")
    known = common.discovery in ("file", "kubernetes")
    if not known and not re.fullmatch(r"etcd://[^/\s]+:\d+", common.discovery):
        problems.append(
            f"Common.discovery = {common.discovery!r}: must be file, kubernetes or etcd://host:port"
        )
    return problems
