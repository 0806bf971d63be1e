"""What operators may ask, and what they are told when it cannot be done."""

import json

import pytest
from records import RECORD

from dynamo_poa.clock import ManualClock
from dynamo_poa.control import ControlService
from dynamo_poa.values import Mode, Pin


class FakeLoop:
    def __init__(self):
        self.latest = RECORD
        self.asked = []

    def pin(self, pin):
        self.asked.append(pin)

    def release(self, *, forget=False):
        self.asked.append("forget" if forget else "release")


def ask(loop, command, mode=Mode.ACTIVE):
    request = command if isinstance(command, bytes) else json.dumps(command).encode()
    return json.loads(ControlService(loop, mode, ManualClock(monotonic_s=1000.0)).answer(request))


def test_status_answers_with_the_latest_record():
    """{"ok": true, ...latest telemetry record...}."""
    loop = FakeLoop()
    answer = ask(loop, {"op": "status"})
    assert (answer["ok"], answer["tick"], answer["regime"], answer["poa_hat"]) == (True, 7, "transition", 1.5)
    assert loop.asked == []


def test_status_before_the_first_tick_is_an_error_in_words():
    """Never an empty answer."""
    loop = FakeLoop()
    loop.latest = None
    assert ask(loop, {"op": "status"}) == {
        "ok": False,
        "error": "no tick yet: the controller is starting",
    }


@pytest.mark.parametrize(("for_s", "until_s"), [(60, 1060.0), (None, None)])
def test_set_pins_both_values(for_s, until_s):
    """`dynamo-poa set --for 60s`; without it until release."""
    loop = FakeLoop()
    command = {"op": "set", "router_temperature": 0.3, "overlap_weight": 1, "for_s": for_s}
    assert ask(loop, command)["ok"] is True
    assert loop.asked == [Pin(router_temperature=0.3, overlap_weight=1, until_s=until_s)]


def test_release_can_ask_the_policy_to_begin_anew():
    """`dynamo-poa release --forget`; anything but true or false changes nothing."""
    loop = FakeLoop()
    assert ask(loop, {"op": "release", "forget": True})["ok"] is True
    refused = ask(loop, {"op": "release", "forget": 1})
    assert refused == {"ok": False, "error": "forget = 1: must be true or false"}
    assert loop.asked == ["forget"]


def test_release_gives_the_parameters_back():
    """`dynamo-poa release`."""
    loop = FakeLoop()
    assert ask(loop, {"op": "release"})["ok"] is True
    assert loop.asked == ["release"]


SET = {"op": "set", "router_temperature": 0.3, "overlap_weight": 1.0}


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"{", "request = '{': must be a JSON object"),
        (b"[1]", "request = [1]: must be a JSON object"),
        (b'{"op":"set","router_temperature":NaN,"overlap_weight":1}', "must be a JSON object"),
        ({"op": "boom"}, "op = 'boom': must be one of set, release, status"),
        ({}, "op = None: must be one of set, release, status"),
        (
            {"op": "set", "router_temperature": 0.3},
            "overlap_weight = None: must be given: both change together or not at all",
        ),
        (
            SET | {"router_temperature": "0.7"},
            "router_temperature = '0.7': must be a finite number in [0, 100]",
        ),
        (SET | {"overlap_weight": -0.5}, "overlap_weight = -0.5: must be a finite number in [0, 2]"),
        (SET | {"for_s": 0}, "for_s = 0: must be > 0 and <= 2.592e+06, or null for ever"),
        (SET | {"for_s": True}, "for_s = True: must be > 0 and <= 2.592e+06, or null for ever"),
        (SET | {"tau": 1}, "tau = 1: must be left out: it is not a key of set"),
    ],
)
def test_a_bad_request_changes_nothing_and_is_told_key_value_and_bound(command, error):
    """Bad input is refused whole."""
    loop = FakeLoop()
    answer = ask(loop, command)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert loop.asked == []


@pytest.mark.parametrize("command", [SET, {"op": "release"}])
def test_mode_off_cannot_be_pinned(command):
    """`off` means static parameters; to pin them, run shadow or active."""
    loop = FakeLoop()
    answer = ask(loop, command, Mode.OFF)
    assert answer == {"ok": False, "error": f"mode = 'off': must be shadow or active for {command['op']}"}
    assert loop.asked == []
    assert ask(loop, {"op": "status"}, Mode.OFF)["ok"] is True
