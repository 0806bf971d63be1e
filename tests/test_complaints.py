"""Lines that may come by the thousand are one a second."""

from structlog.testing import capture_logs

from dynamo_poa.clock import ManualClock
from dynamo_poa.complaints import Complaints


async def test_each_event_is_said_once_a_second_with_the_number_of_those_that_were_not() -> None:
    """An outage must not become a flood of lines, nor one kind of line hide another."""
    clock = ManualClock()
    complaints = Complaints(clock)
    with capture_logs() as logs:
        for number in range(4):
            complaints.say("poa.a", number=number)
            complaints.say("poa.b")
        await clock.advance(1.0)
        complaints.say("poa.a", number=4)
        await clock.advance(1.0)
        complaints.say("poa.a", number=5)
    assert logs == [
        {"event": "poa.a", "log_level": "warning", "number": 0, "more": 0},
        {"event": "poa.b", "log_level": "warning", "more": 0},
        {"event": "poa.a", "log_level": "warning", "number": 4, "more": 3},
        {"event": "poa.a", "log_level": "warning", "number": 5, "more": 0},
    ]
