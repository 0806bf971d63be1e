"""What an operator may ask of a running controller, and the answer.

Owns: commands and answers on `poa.<namespace>.control`, JSON both ways: set (a pin), release, status.
Does not own: the transport (bus.py), what a pin does (controller.py).
Invariant: every request is answered; a bad one changes nothing and is told which key, value and bound.
"""

import math
from typing import Any, Protocol

import msgspec

from dynamo_poa.clock import Clock
from dynamo_poa.errors import ParamsError
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Mode, Pin, RouterParams

MAX_PIN_S = 30 * 86_400.0
OPS = ("set", "release", "status")


class Controlled(Protocol):
    """What the service needs of loop.ControlLoop."""

    latest: TelemetryRecord | None

    def pin(self, pin: Pin) -> None:
        """Hold an operator's parameters from the next tick on."""
        ...

    def release(self, *, forget: bool = False) -> None:
        """Give the parameters back to the policy from the next tick on; with `forget` it begins anew."""
        ...


class ControlService:
    """Answers operators. A change takes effect with the next tick; `status` then shows it."""

    def __init__(self, loop: Controlled, mode: Mode, clock: Clock) -> None:
        self._loop = loop
        self._mode = mode
        self._clock = clock

    def answer(self, request: bytes) -> bytes:
        """Return {"ok": true, ...the latest record} or {"ok": false, "error": "key = value: must be ..."}."""
        try:
            self._obey(_command(request))
        except ParamsError as error:
            return msgspec.json.encode({"ok": False, "error": str(error)})
        record = self._loop.latest
        if record is None:
            return msgspec.json.encode({"ok": False, "error": "no tick yet: the controller is starting"})
        return msgspec.json.encode({"ok": True, **msgspec.to_builtins(record)})

    def _obey(self, command: dict[str, Any]) -> None:
        op = command.get("op")
        if op not in OPS:
            raise ParamsError("out_of_range", "op", op, "one of " + ", ".join(OPS))
        if op == "status":
            return
        if self._mode is Mode.OFF:
            raise ParamsError("mode", "mode", str(self._mode), f"shadow or active for {op}")
        if op == "release":
            self._loop.release(forget=_forget(command))
            return
        self._loop.pin(self._pin(command))

    def _pin(self, command: dict[str, Any]) -> Pin:
        for key in ("router_temperature", "overlap_weight"):
            if key not in command:
                raise ParamsError("missing", key, None, "given: both change together or not at all")
        unknown = command.keys() - {"op", "router_temperature", "overlap_weight", "for_s"}
        for key in sorted(unknown):
            raise ParamsError("unknown", key, command[key], "left out: it is not a key of set")
        # Built for its checks: what a pin may hold is what a record may hold.
        params = RouterParams(
            revision=0,
            router_temperature=command["router_temperature"],
            overlap_weight=command["overlap_weight"],
        )
        for_s = command.get("for_s")
        if for_s is not None and (
            isinstance(for_s, bool)
            or not isinstance(for_s, int | float)
            or not math.isfinite(for_s)
            or not 0 < for_s <= MAX_PIN_S
        ):
            raise ParamsError("out_of_range", "for_s", for_s, f"> 0 and <= {MAX_PIN_S:g}, or null for ever")
        return Pin(
            router_temperature=params.router_temperature,
            overlap_weight=params.overlap_weight,
            until_s=None if for_s is None else self._clock.monotonic_s() + for_s,
        )


def _forget(command: dict[str, Any]) -> bool:
    forget = command.get("forget", False)
    if not isinstance(forget, bool):
        raise ParamsError("type", "forget", forget, "true or false")
    return forget


def _command(request: bytes) -> dict[str, Any]:
    try:
        command = msgspec.json.decode(request)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        shown = request[:80].decode(errors="replace")
        raise ParamsError("not_json", "request", shown, "a JSON object") from error
    if not isinstance(command, dict):
        raise ParamsError("type", "request", command, "a JSON object")
    return command
