"""The table of every configuration key, as README shows it: `python -m dynamo_poa.serve.reference`.

Owns: turning the configuration's own declarations into Markdown.
Does not own: keys, defaults, bounds and meanings; those stand once, in config.py.
"""

import sys
from typing import Any, Literal, get_args, get_origin

import msgspec

from dynamo_poa.config import (
    CommonConfig,
    ControllerConfig,
    FrontendConfig,
    RouterConfig,
    Section,
    WorkerConfig,
    knobs,
)
from dynamo_poa.values import Mode

SECTIONS: dict[str, type[Section]] = {
    "Common": CommonConfig,
    "Frontend": FrontendConfig,
    "PoaRouter": RouterConfig,
    "PrefillWorker, DecodeWorker, Worker": WorkerConfig,
    "PoaController": ControllerConfig,
}


def config_table() -> str:
    """Return one Markdown table per section: key, default, bound, meaning."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        lines += [f"**{name}**", "", "| key | default | bound | meaning |", "| --- | --- | --- | --- |"]
        lines += [*_rows(section, ""), ""]
    return "\n".join(lines)


def _rows(section: type[Section], prefix: str) -> list[str]:
    defaults = msgspec.to_builtins(section())
    rows: list[str] = []
    for key, (bare, knob) in knobs(section).items():
        if isinstance(bare, type) and issubclass(bare, Section):
            rows += _rows(bare, f"{prefix}{key}.")
            continue
        unit = f" ({knob.unit})" if knob.unit else ""
        bound = knob.bound or _choices(bare)
        rows.append(f"| `{prefix}{key}` | `{_shown(defaults[key])}` | {bound} | {knob.doc}{unit} |")
    return rows


def _choices(bare: Any) -> str:
    if get_origin(bare) is tuple and get_origin(get_args(bare)[0]) is Literal:
        return "any of " + ", ".join(get_args(get_args(bare)[0]))
    if get_origin(bare) is Literal:
        return ", ".join(name or '""' for name in get_args(bare))
    return ", ".join(Mode) if bare is Mode else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return '""' if value == "" else str(value)


if __name__ == "__main__":
    sys.stdout.write(config_table())
