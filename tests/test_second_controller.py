"""What a controller process notices beside its ticks."""

from collections.abc import Callable

import msgspec
from structlog.testing import capture_logs

from dynamo_poa.controller_process import MAX_SAID, watch_for_another
from dynamo_poa.values import Mode, RouterParams
from dynamo_poa.wire import Heartbeat


class Wire:
    """A bus with one listener."""

    def __init__(self) -> None:
        self.hear: Callable[[str, bytes], None] = lambda *_: None

    def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> None:
        assert subject == "poa.poa.params"
        self.hear = handler


def heartbeat(controller_id: str) -> bytes:
    params = RouterParams(revision=1, router_temperature=0.0, overlap_weight=1.0)
    return msgspec.msgpack.encode(
        Heartbeat(controller_id=controller_id, sent_at_s=1.0, mode=Mode.ACTIVE, params=params)
    )


def test_another_controller_of_the_namespace_is_named_once() -> None:
    """Two controllers move the same routers; nothing else would tell."""
    wire = Wire()
    watch_for_another(wire, "poa", "controller-1")  # type: ignore[arg-type]
    with capture_logs() as logs:
        for controller_id in ("controller-1", "controller-2", "controller-2", "controller-1"):
            wire.hear("poa.poa.params", heartbeat(controller_id))
        wire.hear("poa.poa.params", b"\xc1")
        for number in range(100, 140):
            wire.hear("poa.poa.params", heartbeat(f"controller-{number}"))
    assert logs[0] == {
        "event": "poa.controller.second",
        "log_level": "warning",
        "namespace": "poa",
        "other": "controller-2",
    }
    assert len(logs) == MAX_SAID
