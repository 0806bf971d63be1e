"""How fast workers are that are not there: from a timing profile, or measured in another recording.

Owns: which worker of a report stands for its pool, what makes a report bad.
Does not own: profiles and their fit (bench/suites), measuring (latency.py).
Invariant: measured or fitted, never guessed; a pool that is not told of is an error.
"""

import statistics
from pathlib import Path

import msgspec

from dynamo_poa.bench.suites import profiles
from dynamo_poa.bench.suites.profile_curves import curves_of
from dynamo_poa.errors import ConfigError
from dynamo_poa.values import Curve, Role

ENOUGH_PASSES = 8  # of a worker whose measured speed is taken
MAX_S = 3600.0  # of a pass, a token or a request: as wire.py has it


def speeds_of_profile(profile: str) -> tuple[dict[Role, Curve], int | None, str]:
    """Return the curves fitted to a profile, the KV blocks of its worker if it tells, and how well they fit.

    Raises:  ConfigError when there is no such profile.
    """
    prefill, decode = curves_of(profiles.path_of(profile))
    kv_blocks = profiles.about(profile).kv_blocks if profile in profiles.names() else None
    fits = f"prefill within {prefill.error_frac:.0%}, decode within {decode.error_frac:.0%} in the mean"
    curves = {Role.PREFILL: prefill.curve, Role.DECODE: decode.curve}
    return curves, kv_blocks, f"curves fitted to profile {profile}: {fits}"


class _Measured(msgspec.Struct, frozen=True):
    """One worker of `estimate --json`."""

    role: Role
    curve: Curve
    samples: float = 0.0
    factor: float | None = None


class _Report(msgspec.Struct, frozen=True):
    workers: tuple[_Measured, ...]


def speeds_of_report(path: Path) -> dict[Role, Curve]:
    """Return the speed of each pool's median worker from what `dynamo-poa estimate --json` printed.

    Raises:  ConfigError when the file is none, or lacks a pool.
    """
    try:
        workers = msgspec.json.decode(path.read_bytes(), type=_Report).workers
    except (OSError, msgspec.DecodeError) as error:
        what = "must be what dynamo-poa estimate --json printed"
        raise ConfigError([f"--speeds {path}: {what}: {error}"]) from error
    curves = {}
    for role in (Role.PREFILL, Role.DECODE):
        members = [one for one in workers if one.role is role and one.samples >= ENOUGH_PASSES]
        if not members:
            raise ConfigError([f"--speeds {path}: has no {role} worker with {ENOUGH_PASSES} passes or more"])
        middle = statistics.median_low([one.factor or 1.0 for one in members])
        curves[role] = next(one.curve for one in members if (one.factor or 1.0) == middle)
        for key, value in msgspec.structs.asdict(curves[role]).items():
            if not 0 <= value <= MAX_S:
                bound = f"must be in [0, {MAX_S:g}]"
                raise ConfigError([f"--speeds {path}: {role} curve.{key} = {value:g}: {bound}"])
    return curves
