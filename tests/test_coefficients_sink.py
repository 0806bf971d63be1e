"""What routers are told of the workers' speeds: when it goes out, what is in it, what is refused."""

import msgspec
import pytest
from records import RECORD

from dynamo_poa.clock import ManualClock
from dynamo_poa.coefficients_sink import CoefficientsSink
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.errors import BusError, WireError
from dynamo_poa.load import RankLoad
from dynamo_poa.output_tokens import OutputTokens
from dynamo_poa.values import Curve, Outcome, Role, Selection, WorkerCard, WorkerKey, WorkerLatency
from dynamo_poa.wire import Coefficients, ForwardPass, PoolSpeed, WorkerSpeed, decode_coefficients

W1 = 14370722098883561847  # above 2**63
CARD = WorkerCard(worker_id=W1, role=Role.AGGREGATED, kv_block_size=16)
SLOW = Curve(
    prefill_base_s=0.01,
    prefill_token_s=0.0001,
    decode_base_s=0.02,
    decode_request_s=0.001,
    decode_kv_token_s=1e-6,
    pressure_s=0.5,
)
POOL = Curve(decode_base_s=0.004)
MARGINAL = msgspec.structs.replace(RECORD, selection=Selection.MARGINAL)


class Fleet:
    """A controller's surroundings: a bus that keeps what is published, one worker and its model."""

    def __init__(self):
        self.sent = []
        self.connected = True
        self.load = RankLoad(None, 0.0)
        self.latencies = {
            WorkerKey(W1, 0): WorkerLatency(key=WorkerKey(W1, 0), role=CARD.role, curve=SLOW, samples=9.5)
        }
        self.decisions = DecisionLog(window=16, ttft_window_s=3.0, stale_s=30.0, block_size=16)
        self.output_tokens = OutputTokens()
        self.counter_id = 0
        self.pools = {Role.AGGREGATED: POOL}
        self.sink = CoefficientsSink(
            self,
            "poa",
            "controller-1",
            ManualClock(),
            decisions=self.decisions,
            output_tokens=self.output_tokens,
            workers=lambda: [self.load.state(WorkerKey(W1, 0), CARD, 1.0, 30.0, False)],
            latencies=lambda: self.latencies,
            pools=lambda: self.pools,
        )

    async def publish(self, subject, data):
        if not self.connected:
            raise BusError("not connected")
        self.sent.append((subject, data))

    def ran(self, *, prefill=(0, 0), decode=(0, 0), queued=(0, 0), preempted=0):
        """Take in a pass: requests and tokens of each kind."""
        self.counter_id += 1
        done = ForwardPass(W1, 0, self.counter_id, 0.01, *prefill, 0, *decode, *queued, preempted, 0)
        self.load.take_pass(7, done, 0.5)
        self.output_tokens.observe(WorkerKey(W1, 0), CARD, done, 0.5)

    async def told(self, record=MARGINAL):
        self.sent.clear()
        await self.sink.emit(record)
        return [decode_coefficients(data) for _, data in self.sent]


@pytest.fixture
def fleet():
    return Fleet()


async def test_only_where_the_plugin_is_to_select_routers_are_told(fleet):
    """While the setting in force leaves selection to Dynamo nobody needs it."""
    assert await fleet.told(RECORD) == []
    assert len(await fleet.told()) == 1
    assert fleet.sent[0][0] == "poa.poa.coefficients"


async def test_the_message_says_what_is_known_of_each_worker_and_pool(fleet):
    """Curve, evidence and load; requests in a prefill pass have no first token yet: they count as queued."""
    fleet.ran(prefill=(2, 900), decode=(3, 4000), queued=(4, 7000), preempted=1)
    fleet.decisions.outcomes[Role.AGGREGATED, Outcome.OK] = 9
    fleet.decisions.outcomes[Role.AGGREGATED, Outcome.CANCELLED] = 3
    fleet.decisions.outcomes[Role.AGGREGATED, Outcome.FAILED] = 100
    fleet.ran(decode=(357, 4003), queued=(4, 7000), preempted=1)
    [message] = await fleet.told()
    clock = ManualClock()
    assert message == Coefficients(
        controller_id="controller-1",
        revision=int(clock.wall_s() * 1000),
        sent_at_s=clock.wall_s(),
        lease_s=10.0,
        routers=1,
        pools={Role.AGGREGATED: PoolSpeed(curve=POOL, output_tokens_mean=30.0)},
        workers=(WorkerSpeed(W1, 0, SLOW, 9.5, 357, 4003, 5, 7000),),
    )
    assert [told.revision for told in await fleet.told()] == [message.revision + 1]


async def test_in_a_pass_that_only_prefills_those_past_their_first_token_still_count(fleet):
    """Engines that take turns run one kind at a time; the others wait and have not gone."""
    fleet.ran(decode=(3, 4000))
    fleet.ran(prefill=(1, 500))
    [speed] = (await fleet.told())[0].workers
    assert (speed.running_requests, speed.kv_tokens, speed.queued_requests) == (3, 4000, 1)
    fleet.ran()
    [speed] = (await fleet.told())[0].workers
    assert (speed.running_requests, speed.kv_tokens, speed.queued_requests) == (0, 0, 0)


async def test_what_is_not_known_is_none_and_a_worker_without_a_model_is_left_out(fleet):
    """A worker that never reported a pass may still have its pool's curve."""
    assert (await fleet.told())[0].workers == (WorkerSpeed(W1, 0, SLOW, 9.5),)
    assert (await fleet.told())[0].pools[Role.AGGREGATED].output_tokens_mean is None
    fleet.latencies = {}
    assert (await fleet.told())[0].workers == ()


async def test_one_who_knows_nothing_says_nothing(fleet):
    """A controller that has just been restarted leaves routers what its predecessor told, for the lease."""
    fleet.pools = {}
    assert await fleet.told() == []


async def test_what_could_not_be_sent_is_counted(fleet):
    """Sink: it never raises."""
    fleet.connected = False
    assert (await fleet.told(), fleet.sink.dropped) == ([], 1)


def bad(**change):
    message = Coefficients(
        controller_id="c",
        revision=1,
        sent_at_s=1.0,
        pools={Role.DECODE: PoolSpeed(curve=POOL, output_tokens_mean=64.0)},
        workers=(WorkerSpeed(W1, 0, SLOW, 1.0, 1, 1, 1, 1),),
    )
    return msgspec.msgpack.encode(msgspec.to_builtins(message) | change)


def speeds(**change):
    curve = msgspec.to_builtins(SLOW) | change
    return [[W1, 0, curve, 1.0, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (b"\x91" * 100_000, "coefficients"),
        (bytes(5 * 2**20), "too_large"),
        (bad(version=2), "version"),
        (bad(workers={}), "coefficients"),
        (bad(pools={"encode": {"curve": {}}}), "coefficients"),
        (bad(lease_s=0), "coefficients"),
        (bad(lease_s=float("nan")), "coefficients"),
        (bad(routers=-1), "coefficients"),
        (bad(sent_at_s=float("nan")), "impossible_value"),
        (bad(pools={"decode": {"curve": {}, "output_tokens_mean": float("nan")}}), "impossible_value"),
        (bad(pools={"decode": {"curve": {}, "output_tokens_mean": -1.0}}), "impossible_value"),
        (bad(pools={"decode": {"curve": {"decode_base_s": -0.001}}}), "impossible_value"),
        (bad(workers=speeds(prefill_token_s=float("inf"))), "impossible_value"),
        (bad(workers=speeds(decode_kv_token_s=float("nan"))), "impossible_value"),
        (bad(workers=speeds(decode_base_s=1e300)), "impossible_value"),  # its cost would be infinite, or NaN
        (bad(workers=[[-1, 0, {}, 0.0]]), "impossible_value"),
        (bad(workers=[[W1, 2**32, {}, 0.0]]), "impossible_value"),
        (bad(workers=[[W1, 0, {}, float("nan")]]), "impossible_value"),
        (bad(workers=[[W1, 0, {}, 0.0, -1]]), "coefficients"),
    ],
)
def test_coefficients_that_cannot_be_taken_have_a_reason(data, reason):
    """Refused whole: half a message would send all requests to whoever is left."""
    with pytest.raises(WireError) as caught:
        decode_coefficients(data)
    assert caught.value.reason == reason


def test_a_field_we_do_not_know_is_ignored():
    """Another version's controller."""
    assert decode_coefficients(bad(colour="blue")).revision == 1
