"""Decides how YAML text becomes values: as YAML 1.2 has it.

Owns: `off`, `on`, `yes` and `no` are words, 1e3 is a number; how a syntax error is told.
Does not own: what values a key takes.
Invariant: `mode: off` is the mode, not false.
Source: YAML 1.2.2, section 10.3.2; PyYAML implements 1.1.
"""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's booleans and floats."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def load_yaml(text: str) -> Any:
    """Return the value of one document.

    Raises:  yaml.YAMLError; ValueError for what only looks like a date, such as 2026-13-40
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def syntax_problem(source: str, error: yaml.YAMLError | ValueError) -> str:
    """Return where in a source its text is no YAML and why, in one line without PyYAML's excerpt."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, error.problem or error.context or "not YAML"
        return (
            f"{source} line {mark.line + 1} column {mark.column + 1}: {problem.replace(', but got', ', got')}"
        )
    where = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
    return f"{source}: {where}"
