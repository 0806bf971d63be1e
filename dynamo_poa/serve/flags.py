"""Decides how a mapping from YAML becomes command-line flags.

Owns: that one rule, the same for every engine, and that a flag is not set in two places.
Does not own: which flags exist; an engine refuses what it does not know.
Invariant: flags come in the order of the mapping; every value that is not null is in them.
"""

import json
from collections.abc import Mapping
from typing import Any


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return `--key value` for each entry, in order.

    true gives `--key`, false `--no-key`, null nothing, a list `--key a b`, a mapping `--key JSON`.
    """
    result: list[str] = []
    for key, value in arguments.items():
        if value is None:
            continue
        if value is False:
            result.append(f"--no-{key}")
            continue
        result.append(f"--{key}")
        if value is True:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        result += [json.dumps(item) if isinstance(item, Mapping) else str(item) for item in values]
    return result


def reserved_problems(path: str, arguments: Mapping[str, Any], reserved: Mapping[str, str]) -> list[str]:
    """Return one message per argument that a key of ours already sets.

    Args:     path: where the arguments stand.  reserved: flag to the key that sets it.
    """
    return [
        f"{path}.{key} = {value!r}: set {reserved[name]} instead"
        for key, value in arguments.items()
        if (name := str(key).replace("_", "-")) in reserved
    ]
