"""Two deployments on one NATS server: neither sees, counts or writes what is the other's (case S10)."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import nats
import pytest
from dynamo_messages import W1, W2, W3, W4, card, envelope, fp, km, st, subject
from nats_server import NatsServer
from waiting import eventually
from wired_controller import CLOCK, wired_controller

from dynamo_poa.bench.replay import Message, RawPublisher, pub_lines
from dynamo_poa.config import CommonConfig, ControllerConfig, RegimeConfig
from dynamo_poa.fleet import Fleet
from dynamo_poa.latency import LatencyBook
from dynamo_poa.params import KEY, bucket, decode_params
from dynamo_poa.telemetry import TelemetryRecord
from dynamo_poa.values import Outcome, PoolLoad, Regime, Role
from dynamo_poa.wire import Chosen, DecisionBatch, Ended, FirstToken

pytestmark = pytest.mark.dynamo  # importing the controller's wiring imports Dynamo

CONFIG = ControllerConfig(
    tick_s=0.1,
    estimate_s=0.1,
    regime=RegimeConfig(baseline_s=0.1, confirm_s=0.5, dwell_s=0.5, window_s=1.0, min_samples=5),
)
PERIOD_S = 0.1
RUN_S = 2.0


class Deployment:
    """What workers and a router of one namespace say, period by period.

    The router keeps six requests on each deployment's first worker and answers others within `ttft_s`.
    """

    def __init__(self, namespace: str, workers: tuple[int, ...], *, saturated: bool) -> None:
        self.namespace, self.workers, self.saturated = namespace, workers, saturated
        self.common = CommonConfig(namespace=namespace)
        self.cards = [card(worker_id) for worker_id in workers]
        self._period = 0

    def next_messages(self) -> list[Message]:
        """Return what is said in the next period."""
        self._period += 1
        used, queued, ttft_s = (4050, 40, 9.0) if self.saturated else (400, 0, 0.1)
        messages = []
        for worker_id in self.workers:
            messages += [
                self._dynamo(worker_id, km(worker_id, None, None, used)),
                self._dynamo(worker_id, fp(worker_id, self._period, 0.05, nd=6, qn=queued, qt=queued * 64)),
                self._dynamo(worker_id, st(worker_id, self._period, None, [self._period])),
            ]
        return [*messages, self._batch(ttft_s)]

    def _dynamo(self, worker_id: int, said: tuple[str, Any]) -> Message:
        topic, body = said
        data = envelope(topic, msgspec.msgpack.encode(body), worker_id % 2**40, self._period, CLOCK.wall_s())
        return Message(subject(topic, self.common.worker_namespace), data)

    def _batch(self, ttft_s: float) -> Message:
        now_s = CLOCK.wall_s()
        events: list[Chosen | FirstToken | Ended] = []
        names = [f"{self._period}"] if self._period > 1 else [*map("long {}".format, range(6)), "1"]
        for name in names:
            began_s = now_s - ttft_s
            events += [
                Chosen(name, Role.AGGREGATED, began_s, began_s, self.workers[0], 0, 64, 1, 1, ()),
                FirstToken(name, Role.AGGREGATED, now_s),
            ]
            if not name.startswith("long"):
                events.append(Ended(name, Role.AGGREGATED, now_s, Outcome.OK))
        batch = DecisionBatch(
            router_id="router-0",
            sequence=self._period,
            sent_at_s=now_s,
            events=tuple(events),
            in_flight={"aggregated": 6},
            params_revision=1,
            params_source="heartbeat",
        )
        return Message(f"poa.{self.namespace}.decisions", msgspec.msgpack.encode(batch))


async def run(url: str, *deployments: Deployment) -> list[tuple[str, list[TelemetryRecord]]]:
    """Let deployments and their controllers live side by side; return each one's /metrics and records."""
    publisher = RawPublisher(url)
    async with AsyncExitStack() as stack:
        controllers = []
        for deployment in deployments:
            book = LatencyBook()
            fleet = Fleet(deployment.common.worker_namespace, CONFIG.stale_s, on_pass=book.observe)
            controllers.append(
                await stack.enter_async_context(
                    wired_controller(
                        url, deployment.common, fleet, deployment.cards, config=CONFIG, book=book
                    )
                )
            )
        await eventually(lambda: all(one.records for one in controllers))
        for _ in range(round(RUN_S / PERIOD_S)):
            for deployment in deployments:
                publisher.send(pub_lines(deployment.next_messages()))
            await asyncio.sleep(PERIOD_S)
        pages = []
        async with aiohttp.ClientSession() as client:
            for one in controllers:
                async with client.get(one.metrics_url) as answer:
                    pages.append(await answer.text())
    publisher.close()
    return [(page, one.records) for page, one in zip(pages, controllers, strict=True)]


def load(record: TelemetryRecord) -> dict[str, PoolLoad]:
    """Return the pools but for how busy they are, which depends on the moment."""
    return {role: msgspec.structs.replace(pool, busy_frac=None) for role, pool in record.pools.items()}


@pytest.mark.parametrize(
    ("ours", "other", "their_workers"),
    [
        ("poa-a", "poa-b", (W1, W2, W3, W4)),  # two ids are ours as well
        ("poa-a", "poa", (W3, W4, 7, 8)),
        ("poa", "poa-a", (W3, W4, 7, 8)),
    ],
)
async def test_a_saturated_neighbour_changes_nothing(
    nats_server: NatsServer, ours: str, other: str, their_workers: tuple[int, ...]
) -> None:
    """Case S10: regime and estimate as without it, none of its ids, and each writes its own key only."""
    (_, alone), *_ = await run(nats_server.url, Deployment(ours, (W1, W2), saturated=False))
    (page, records), (their_page, _) = await run(
        nats_server.url,
        Deployment(ours, (W1, W2), saturated=False),
        Deployment(other, their_workers, saturated=True),
    )
    assert {record.regime for record in records} == {Regime.BELOW}
    assert {record.namespace for record in records} == {ours}
    assert records[-1].poa_hat is not None
    assert alone[-1].poa_hat is not None
    assert records[-1].poa_hat == pytest.approx(alone[-1].poa_hat, rel=0.05)
    assert records[-1].poa_hat > 1.2  # all on one of two workers
    assert load(records[-1]) == load(alone[-1])
    assert records[-1].in_flight == 6
    said = page + "".join(msgspec.json.encode(record).decode() for record in records)
    foreign = [worker_id for worker_id in their_workers if worker_id not in (W1, W2)]
    assert [worker_id for worker_id in foreign if f'worker_id="{worker_id}"' in said] == []
    assert [worker_id for worker_id in foreign if worker_id > 8 and str(worker_id) in said] == []
    assert all(f'worker_id="{worker_id}"' in their_page for worker_id in their_workers)
    assert records[-1].messages_dropped == {}

    client = await nats.connect(nats_server.url)
    streams = {info.config.name for info in await client.jetstream().streams_info()}
    assert streams == {f"KV_{bucket(ours)}", f"KV_{bucket(other)}"}
    stored = await (await client.jetstream().key_value(bucket(ours))).get(KEY)
    await client.close()
    params = decode_params(stored.value or b"")
    assert (params.router_temperature, params.overlap_weight, params.regime) == (0.0, 1.0, Regime.BELOW)
    assert params.revision == records[-1].revision
