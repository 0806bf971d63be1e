"""Which coefficients are in force."""

from typing import Any

import msgspec
import pytest

from dynamo_poa.clock import ManualClock
from dynamo_poa.coefficients import CoefficientsHolder, CoefficientsSubscriber, Speeds
from dynamo_poa.errors import Unpicked
from dynamo_poa.marginal import OUTPUT_TOKENS
from dynamo_poa.values import Curve, Role, WorkerKey
from dynamo_poa.wire import Coefficients, PoolSpeed, WorkerSpeed

OWN, POOL = Curve(decode_base_s=0.05), Curve(decode_base_s=0.01)


def message(revision: int = 1, controller_id: str = "c1", **given: Any) -> Coefficients:
    fields: dict[str, Any] = {
        "pools": {Role.DECODE: PoolSpeed(curve=POOL, output_tokens_mean=40.0)},
        "workers": (WorkerSpeed(7, 0, OWN, 100.0),),
    }
    return Coefficients(
        controller_id=controller_id, revision=revision, sent_at_s=1.8e9, **{**fields, **given}
    )


def offered(holder: CoefficientsHolder, **given: Any) -> str | None:
    """Return why a message was refused."""
    refusal = holder.offer_bytes(msgspec.msgpack.encode(message(**given)))
    return None if refusal is None else refusal.reason


async def test_a_worker_has_its_own_curve_else_its_pools_else_none() -> None:
    """A worker that has just joined goes by its pool; a role nobody measured by nothing."""
    speeds = Speeds(message())
    assert speeds.curve(WorkerKey(7, 0), Role.DECODE) is OWN
    assert speeds.curve(WorkerKey(7, 1), Role.DECODE) is POOL
    assert speeds.curve(WorkerKey(8, 0), Role.PREFILL) is None


async def test_the_output_expected_is_the_pools_mean_else_a_guess() -> None:
    """Never below one token."""
    assert Speeds(message()).output_tokens(Role.DECODE) == 40.0
    assert Speeds(message()).output_tokens(Role.PREFILL) == OUTPUT_TOKENS
    none = {Role.DECODE: PoolSpeed(curve=POOL, output_tokens_mean=0.0)}
    assert Speeds(message(pools=none)).output_tokens(Role.DECODE) == 1.0


async def test_before_the_first_message_and_after_the_lease_there_are_none() -> None:
    """Requests then go by Dynamo's own selection; a new message ends that."""
    clock = ManualClock()
    holder = CoefficientsHolder(clock.monotonic_s)
    with pytest.raises(Unpicked) as unpicked:
        holder.speeds()
    assert unpicked.value.reason == "no_coefficients"
    assert offered(holder) is None
    await clock.advance(9.9)
    assert holder.speeds().message.revision == 1
    await clock.advance(0.1)
    with pytest.raises(Unpicked) as unpicked:
        holder.speeds()
    assert unpicked.value.reason == "stale_coefficients"
    assert offered(holder, revision=2) is None
    assert holder.speeds().message.revision == 2


async def test_an_older_revision_is_refused_and_a_new_controllers_is_not() -> None:
    """A controller that starts again counts from the beginning, under another id."""
    holder = CoefficientsHolder(ManualClock().monotonic_s)
    assert offered(holder, revision=5) is None
    assert [offered(holder, revision=5), offered(holder, revision=4)] == ["stale_revision"] * 2
    assert holder.revision == 5
    assert offered(holder, revision=1, controller_id="c2") is None
    assert holder.revision == 1
    assert holder.refused == {"stale_revision": 2}


async def test_a_controller_that_starts_again_under_its_old_id_is_heard_after_the_lease() -> None:
    """In a container every process may be number 1."""
    clock = ManualClock()
    holder = CoefficientsHolder(clock.monotonic_s)
    offered(holder, revision=500)
    await clock.advance(10.0)
    assert offered(holder, revision=1) is None
    assert holder.revision == 1


async def test_a_bad_message_changes_nothing_and_renews_no_lease() -> None:
    """It is refused whole and counted by reason."""
    clock = ManualClock()
    holder = CoefficientsHolder(clock.monotonic_s)
    offered(holder)
    await clock.advance(9.0)
    nan = {Role.DECODE: PoolSpeed(curve=Curve(decode_base_s=float("nan")))}
    assert offered(holder, revision=2, pools=nan) == "impossible_value"
    assert holder.offer_bytes(b"\xc1") is not None
    assert holder.revision == 1
    await clock.advance(1.0)
    with pytest.raises(Unpicked):
        holder.speeds()
    assert holder.refused == {"impossible_value": 1, "not_msgpack": 1}


class FakeBus:
    """Keeps the handler."""

    def subscribe(self, subject: str, handler: Any) -> None:
        self.subject, self.handler = subject, handler


async def test_what_comes_on_the_subject_is_taken_and_told_of() -> None:
    """The ledgers take the workers' totals at receipt."""
    clock, bus = ManualClock(), FakeBus()
    holder, told = CoefficientsHolder(clock.monotonic_s), list[int]()
    holder.on_taken(lambda speeds: told.append(speeds.message.revision))
    async with CoefficientsSubscriber(bus, "ns", holder, clock):  # type: ignore[arg-type]
        bus.handler(bus.subject, msgspec.msgpack.encode(message(revision=3)))
        bus.handler(bus.subject, b"nonsense")
    assert bus.subject == "poa.ns.coefficients"
    assert told == [3]
    assert holder.revision == 3
    assert sum(holder.refused.values()) == 1
