"""How a calibration is told: a YAML fragment that `serve` accepts, with the evidence beside each number.

Owns: the fragment's text; which knobs follow from what was found.
Does not own: what was found (calibrate.py), the knobs and their bounds (config.py).
Invariant: every value stands beside why it is so; where nothing beat the defaults the fragment says that and
           moves nothing.
"""

import math

from dynamo_poa.bench.suites.calibrate import KNEE_FACTOR, VERIFY_SEEDS, Calibration
from dynamo_poa.config import RegimeConfig

SAMPLES_MARGIN = 1.5  # over min_samples, for a window is not always equally full


def yaml_of(found: Calibration) -> str:
    """Return the fragment."""
    fleet = found.fleet
    engine = f"timing profile {fleet.profile}" if fleet.profile else "the mock engine's own timing"
    light = found.curve[0]
    lines = [
        f"# dynamo-poa calibrate: {found.trace}, {found.requests} requests of each half, replayed",
        f"# on {fleet.topology}, {fleet.kv_blocks * fleet.block_tokens:,} KV tokens each, {engine}",
        f"# capacity  {found.capacity_rps:.3g} requests/s: the most that closed loops got through",
        f"# knee      {found.knee_rps:.3g} requests/s: mean TTFT is {KNEE_FACTOR:g} times that of "
        f"{light.offered_rps:.3g} requests/s, {light.ttft_mean_s:.3g} s",
        f"# intervals cover the simulator's chance and arrivals' rounding over {len(VERIFY_SEEDS)} seeds:",
        "# what the traffic of another day does to them only another day's trace can tell",
    ]
    if found.leaves_defaults:
        lines += ["# leave the defaults: nothing beat them", *_reasons(found)]
        lines += ["PoaController:", "  policy:", "    name: static"]
        return "\n".join(lines) + "\n"
    below = found.choices[0].setting
    lines += [
        "PoaRouter:",
        f"  overlap_key: {found.overlap_key}  # what ω becomes; more was gained with it than with the other",
        f"  router_temperature: {below.router_temperature:g}  # as below the knee",
        f"  overlap_weight: {below.overlap_weight:g}  # likewise",
        "PoaController:",
        "  regime:",
        *_thresholds(found),
        "  policy:",
        "    name: table",
    ]
    for choice in found.choices:
        pair = f"[{choice.setting.router_temperature:g}, {choice.setting.overlap_weight:g}]"
        lines += [
            f"    # at {choice.offered_rps:.3g} requests/s: {choice.why}",
            f"    {choice.regime.value}: {pair}",
        ]
    return "\n".join(lines) + "\n"


def _reasons(found: Calibration) -> list[str]:
    return [
        f"#   {choice.regime.value}, {choice.offered_rps:.3g} requests/s: {choice.why}"
        for choice in found.choices
    ]


def _thresholds(found: Calibration) -> list[str]:
    """Return θ1 and θ2, and a window in which TTFT samples suffice at the knee."""
    light = found.curve[0]
    of = f"over the {light.ttft_p99_s:.3g} s of {light.offered_rps:.3g} requests/s"
    lines = []
    if 1 < found.theta1 < found.theta2:
        lines += [
            f"    theta1: {found.theta1:.2f}  # TTFT P99 at the knee {of}",
            f"    theta2: {found.theta2:.2f}  # at capacity, likewise",
        ]
    else:
        seen = f"{found.theta1:.2f} and {found.theta2:.2f}"
        lines += [
            f"    # θ1 and θ2 stay: TTFT P99 at the knee and at capacity is {seen} times the light load's"
        ]
    default = RegimeConfig()
    needed_s = math.ceil(SAMPLES_MARGIN * default.min_samples / found.knee_rps)
    if needed_s > default.window_s:
        at_knee = f"{default.window_s:g} s hold {default.window_s * found.knee_rps:.0f} requests at the knee"
        lines += [
            f"    window_s: {needed_s}  # {at_knee}: few for min_samples = {default.min_samples}",
            f"    confirm_s: {needed_s + 1}  # longer than the window",
            f"    dwell_s: {needed_s + 2}  # longer than the window",
        ]
    return lines
