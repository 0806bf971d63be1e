"""When ticks happen and what is done about them: the one task of the controller that sleeps.

Owns: the tick's schedule, collecting the observation, applying effects, heartbeats, polling the store,
      scraping the frontend; surviving a tick that fails.
Does not own: any decision (controller.py); connections, which whoever builds the loop opens and closes.
Invariant: no failure of a tick, a sink, the bus or the frontend ends the loop; parameters are then held. The
           machine's clock may be set: ticks go by the monotonic one.
Source: architecture, The control loop; case S7 (clock set back).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import structlog

from dynamo_poa import telemetry
from dynamo_poa.advice import AdviceState, next_advice
from dynamo_poa.clock import Clock
from dynamo_poa.controller import pinned, released, step, take_over
from dynamo_poa.coupling import AllocationEstimate, CacheSwap, CachingEstimate
from dynamo_poa.decisions import DecisionLog, Traffic
from dynamo_poa.errors import ActuationError, BusError
from dynamo_poa.fleet import Notice, pools_of
from dynamo_poa.load import WorkerState
from dynamo_poa.policies import settings_to_price
from dynamo_poa.policies.running import Asked
from dynamo_poa.pricing import Pricer
from dynamo_poa.slow_games import SlowGames
from dynamo_poa.telemetry import RouterView, Sink, TelemetryRecord
from dynamo_poa.tick import ControllerState, Counts, Effects, Observation, Settings
from dynamo_poa.ttft import FrontendScraper, FrontendSnapshot, combine
from dynamo_poa.values import Applied, Pin, RouterParams, Setting, WorkerCard

log = structlog.get_logger()

STORE_POLL_S = 1.0
FRONTEND_GRACE_S = 15.0
STORE_WAIT_S = 10.0  # a server without JetStream never answers; routers then live off heartbeats
STORE_TIMEOUT_S = 0.5
RATE_HALF_LIFE_S = 2.0
_NOT_PLAYED = CachingEstimate(reason="not priced"), AllocationEstimate(reason="not priced")


class ParamsChannel(Protocol):
    """What the loop needs of params.ParamsPublisher."""

    current: RouterParams | None
    refused: Counter[str]
    store_errors: int

    async def load(self) -> RouterParams | None:
        """Return the stored record, None when there is none."""
        ...

    async def publish(self, params: RouterParams) -> None:
        """Make a record the one in force, or raise ActuationError and leave the one before."""
        ...

    async def heartbeat(self) -> None:
        """Repeat the record in force."""
        ...

    async def poll_store(self) -> RouterParams | None:
        """Return a record that somebody else wrote, once."""
        ...


# (monotonic, epoch, the setting in force) -> how caches followed its last change
Follow = Callable[[float, float, Setting | None], CacheSwap | None]


class FleetView(Protocol):
    """What the loop needs of fleet.Fleet."""

    received: Counter[str]
    dropped: Counter[str]
    last_message_at_s: float | None

    def set_cards(self, cards: Iterable[WorkerCard], at_s: float) -> None:
        """Replace the known workers."""
        ...

    def workers(self, at_s: float) -> list[WorkerState]:
        """Return every rank as known now."""
        ...

    def take_notices(self, at_s: float) -> list[Notice]:
        """Return what a person should read once."""
        ...


class Connection(Protocol):
    """What the loop needs of bus.Bus."""

    @property
    def connected(self) -> bool:
        """Tell whether NATS is connected."""
        ...

    dropped: int
    handler_errors: int


class ControlLoop:
    """Ticks until cancelled.

    latest:  the last tick's record, None before the first

    Args:     feeds: connections beside `bus` that only bring messages; their losses are counted, and whether
              NATS is there is told by `bus` alone.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock,
        bus: Connection,
        feeds: Sequence[Connection] = (),
        channel: ParamsChannel,
        fleet: FleetView,
        decisions: DecisionLog,
        pricer: Pricer,
        games: SlowGames | None = None,
        follow: Follow | None = None,
        cards: Callable[[], Iterable[WorkerCard]] = tuple,
        frontend: FrontendScraper | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.latest: TelemetryRecord | None = None
        self._settings = settings
        self._clock = clock
        self._bus = bus
        self._connections = (bus, *feeds)
        self._channel = channel
        self._fleet = fleet
        self._decisions = decisions
        self._cards = cards
        self._frontend = frontend
        self._sinks = sinks
        self._state = ControllerState()
        self._stored: RouterParams | None = None
        self._foreign: RouterParams | None = None
        self._awaited_since_s: float | None = None
        self._pricer = pricer
        self._games = games
        self._follow = follow
        self._advice = AdviceState()
        self._due_at_s: dict[str, float] = {}
        self._rate = _Rate()
        self._tick_s = 0.0
        self._failed_ticks = 0
        self._last_failure = ""
        self._failure_beside = ""
        self._apply_failure = ""
        self._scrape: asyncio.Task[None] | None = None
        self._scrape_failure = ""

    @property
    def ready(self) -> bool:
        """Tell whether ticks are made and NATS is connected."""
        return self.latest is not None and self._bus.connected

    def pin(self, pin: Pin) -> None:
        """Hold an operator's parameters from the next tick on."""
        self._state = pinned(self._state, pin)

    def release(self, *, forget: bool = False) -> None:
        """Give the parameters back to the policy from the next tick on; with `forget` it begins anew."""
        self._state = released(self._state, forget=forget)

    async def run(self) -> None:
        """Take over from a predecessor, then tick until cancelled."""
        config = self._settings.config
        try:
            await self._take_over()
            log.info(telemetry.STARTED, namespace=self._settings.namespace, mode=config.mode)
            next_at_s = self._clock.monotonic_s()
            while True:
                await self._guarded_tick()
                # After a late tick the next is a whole period away: a burst of ticks sees nothing new.
                now_s = self._clock.monotonic_s()
                next_at_s = next_at_s + config.tick_s if now_s < next_at_s + config.tick_s else now_s
                await self._clock.sleep(next_at_s - now_s)
        finally:
            await self._pricer.aclose()
            if self._games is not None:
                await self._games.aclose()
            if self._scrape is not None:
                self._scrape.cancel()
                await asyncio.gather(self._scrape, return_exceptions=True)

    async def tick(self) -> Effects:
        """Observe, decide, apply, report: one tick."""
        started_s = self._clock.monotonic_s()
        await self._poll_store(started_s)
        self._start_scrape(started_s)
        # By now: what came while the store answered must not lie ahead of the instant it is judged at.
        seen = self._observe(self._clock.monotonic_s())
        self._foreign = None  # first: a record that the step trips over must not trip every tick after it
        self._state, effects = step(self._state, seen, self._settings, _guarded)
        effects = await self._apply(effects)
        if effects.publish is None or effects.record.applied is Applied.APPLY_FAILED:
            self._foreign = seen.foreign  # not dealt with yet
        self.latest = effects.record
        self._tick_s = self._clock.monotonic_s() - started_s
        for sink in self._sinks:
            await sink.emit(effects.record)
        return effects

    async def _guarded_tick(self) -> None:
        try:
            await self.tick()
        except Exception as error:  # broad on purpose: whatever a tick trips over, parameters are held
            self._failed_ticks += 1
            failure = repr(error)
            if failure != self._last_failure:  # a failure that repeats every tick is said once
                log.exception(telemetry.TICK_FAILED, failed_ticks=self._failed_ticks)
            self._last_failure = failure
            await self._heartbeat_after_failure()
        else:
            self._last_failure = ""

    async def _heartbeat_after_failure(self) -> None:
        """Keep the routers' lease alive; a controller that cannot think must not make them fall back."""
        with contextlib.suppress(BusError):  # without a connection the lease runs out, as it should
            await self._heartbeat(self._clock.monotonic_s())

    async def _take_over(self) -> None:
        """Wait for the store and continue from what a predecessor left there."""
        connected_since_s: float | None = None
        said = ""
        while True:
            now_s = self._clock.monotonic_s()
            connected_since_s = None if not self._bus.connected else connected_since_s or now_s
            try:
                self._stored = await self._channel.load()
                break
            except BusError as error:
                if connected_since_s is not None and now_s - connected_since_s > STORE_WAIT_S:
                    log.warning(telemetry.STORE_UNREAD, error=str(error))
                    break
                if str(error) != said:
                    said = str(error)
                    log.warning(telemetry.WAITING, waiting_for="parameter store", error=said)
            await self._clock.sleep(self._settings.config.tick_s)
        pin = self._state.pin  # an operator may have been quicker
        self._state = take_over(self._stored)
        if pin is not None:
            self._state = pinned(self._state, pin)

    async def _poll_store(self, at_s: float) -> None:
        if not self._bus.connected or not self._is_due("store", at_s, STORE_POLL_S):
            return
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                self._foreign = await self._channel.poll_store() or self._foreign
        except (BusError, TimeoutError) as error:
            log.debug(telemetry.STORE_UNREAD, error=str(error) or "timeout")

    def _start_scrape(self, at_s: float) -> None:
        """Read the frontend beside the ticks: one that hangs must not hold them up."""
        if self._frontend is None or (self._scrape is not None and not self._scrape.done()):
            return
        if self._scrape is not None and (error := self._scrape.exception()) is not None:
            self._say_failed(error)
            self._scrape = None
        if self._frontend.answered or self._is_overdue(at_s):
            failure, self._scrape_failure = self._scrape_failure, self._frontend.last_error
            if self._scrape_failure not in ("", failure):  # one that repeats is said once
                log.warning(telemetry.FRONTEND_UNREACHABLE, error=self._scrape_failure)
        if self._is_due("scrape", at_s, self._settings.config.scrape_s):
            self._scrape = asyncio.create_task(
                self._frontend.scrape(self._clock.monotonic_s), name="frontend scrape"
            )

    def _say_failed(self, error: BaseException) -> None:
        """Count what failed beside a tick as a failed tick; one that repeats is said once."""
        self._failed_ticks += 1
        failure, self._failure_beside = self._failure_beside, repr(error)
        if self._failure_beside != failure:
            log.error(telemetry.TICK_FAILED, failed_ticks=self._failed_ticks, exc_info=error)

    def _is_overdue(self, at_s: float) -> bool:
        """Tell whether a frontend should have answered by now: it starts after the controller."""
        if self._awaited_since_s is None:
            self._awaited_since_s = at_s
        return at_s - self._awaited_since_s >= FRONTEND_GRACE_S

    def _observe(self, at_s: float) -> Observation:
        config, decisions, fleet = self._settings.config, self._decisions, self._fleet
        fleet.set_cards(self._cards(), at_s)
        for notice in fleet.take_notices(at_s):
            log.warning(telemetry.NOTICED, **msgspec.structs.asdict(notice))
        decisions.advance(at_s)
        workers = fleet.workers(at_s)
        if (error := self._pricer.take_failure()) is not None:
            self._say_failed(error)
        if self._is_due("estimate", at_s, config.estimate_s):
            self._pricer.look(at_s, workers, decisions, self._asked_about())
        caching, allocation = self._slow_games(at_s, known=bool(workers))
        looked_at_s = None if self._games is None else self._games.looked_at_s
        self._advice = next_advice(self._advice, allocation, looked_at_s, at_s)
        ttft, traffic = decisions.take_ttft(), decisions.traffic(at_s)
        if self._frontend is not None:
            from_frontend, snapshot = self._frontend.take(at_s)
            ttft = combine(from_frontend, ttft)
            traffic = _with_frontend(traffic, snapshot)
        heard = [at for at in (fleet.last_message_at_s, decisions.last_batch_at_s) if at is not None]
        current, wall_s = self._channel.current or self._stored, self._clock.wall_s()
        in_force = None if current is None else current.setting
        return Observation(
            wall_s=wall_s,
            monotonic_s=at_s,
            current=current,
            announced=self._channel.current is not None,
            foreign=self._foreign,
            ttft=ttft,
            estimate=self._pricer.marginal,
            frozen=self._pricer.frozen,
            traffic=traffic,
            cache=decisions.cache,
            pools=pools_of(workers),
            workers=tuple(workers),
            latencies=self._pricer.latencies,
            outcomes=decisions.take_outcomes(),
            predicted=self._pricer.predicted,
            caching=caching,
            allocation=allocation,
            advice=self._advice.given,
            cache_swap=None if self._follow is None else self._follow(at_s, wall_s, in_force),
            routers=tuple(
                RouterView(
                    router_id=router.router_id,
                    revision=router.revision,
                    source=router.source,
                    dropped=router.dropped,
                    in_flight=router.in_flight,
                    age_s=at_s - router.seen_at_s,
                )
                for router in decisions.routers
            ),
            bus_connected=self._bus.connected,
            message_age_s=at_s - max(heard) if heard else None,
            counts=self._counts(at_s),
        )

    def _slow_games(self, at_s: float, *, known: bool) -> tuple[CachingEstimate, AllocationEstimate]:
        """Return the latest prices of the other two games, and have them priced anew when it is time.

        Args:  known: there are workers; before the first a reason that names them would be false.
        """
        games = self._games
        if games is None:
            return _NOT_PLAYED
        if (error := games.take_failure()) is not None:
            self._say_failed(error)
        if known and self._is_due("games", at_s, self._settings.config.games_s):
            games.look(at_s)
        return games.caching, games.allocation

    def _asked_about(self) -> tuple[Setting, ...]:
        """Return the settings that policies want to know the price of."""
        current, settings = self._channel.current or self._stored, self._settings
        in_force = None if current is None else current.setting
        return settings_to_price(settings.config.policy, settings.static, in_force)

    def _counts(self, at_s: float) -> Counts:
        fleet, decisions = self._fleet, self._decisions
        received = {**fleet.received, "decisions": decisions.batches}
        dropped: dict[str, int] = {**fleet.dropped}
        dropped |= {f"decisions_{reason}": count for reason, count in decisions.refused.items()}
        lost = {
            "decisions_lost": decisions.lost,
            "decisions_dropped_by_router": decisions.dropped,
            "decisions_unpriced": decisions.unpriced,
            "outcomes_untold": decisions.untold,
            "snapshots_unpriced": self._pricer.skipped,
            "games_unpriced": 0 if self._games is None else self._games.skipped,
            "passes_unmeasured": self._pricer.unmeasured,
            "requests_forgotten": decisions.forgotten,
            "slow_consumer": sum(connection.dropped for connection in self._connections),
            "handler_failed": sum(connection.handler_errors for connection in self._connections),
            "params_unstored": self._channel.store_errors,
            "telemetry_unsent": sum(sink.dropped for sink in self._sinks),
            "frontend_unread": 0 if self._frontend is None else self._frontend.failures,
        }
        ended: dict[str, int] = {}
        for (_, outcome), count in decisions.outcomes.items():
            ended[outcome] = ended.get(outcome, 0) + count
        return Counts(
            requests_ended=ended,
            params_refused=dict(self._channel.refused),
            messages_received=received,
            messages_dropped=dropped | {name: count for name, count in lost.items() if count},
            message_rate=self._rate.update(sum(received.values()), at_s),
            failed_ticks=self._failed_ticks,
            tick_s=self._tick_s,
        )

    async def _apply(self, effects: Effects) -> Effects:
        """Publish, repeat the heartbeat when due, and say what happened."""
        failed = ""
        at_s = self._clock.monotonic_s()
        if effects.publish is not None:
            try:
                await self._publish(effects.publish)
                self._due_at_s["heartbeat"] = at_s + self._settings.config.heartbeat_s
            except ActuationError as error:
                failed = str(error)
        else:
            try:
                await self._heartbeat(at_s)
            except BusError as error:
                log.debug(telemetry.HEARTBEAT_MISSED, error=str(error))
        said, self._apply_failure = self._apply_failure, failed
        for event in effects.events:
            name, details = event.name, event.details
            if failed and name == telemetry.PARAMS_APPLIED:
                if failed == said:  # asked for again every tick, said once
                    continue
                name, details = telemetry.PARAMS_HELD, {"outcome": Applied.APPLY_FAILED, "error": failed}
            log.info(name, before=event.before, after=event.after, reason=event.reason, **details)
        if not failed:
            return effects
        record = msgspec.structs.replace(effects.record, applied=Applied.APPLY_FAILED)
        return msgspec.structs.replace(effects, record=record)

    async def _publish(self, params: RouterParams) -> None:
        """Publish without a slow store holding up ticks: the heartbeat goes first, `poll_store` heals.

        Raises:  ActuationError when the record is not in force.
        """
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._channel.publish(params)
        except TimeoutError as error:
            if self._channel.current is not params:
                raise ActuationError(f"revision {params.revision} not published: timeout") from error
            log.warning(telemetry.STORE_UNREAD, error=f"revision {params.revision} not stored yet")

    async def _heartbeat(self, at_s: float) -> None:
        if self._bus.connected and self._is_due("heartbeat", at_s, self._settings.config.heartbeat_s):
            await self._channel.heartbeat()

    def _is_due(self, what: str, at_s: float, every_s: float) -> bool:
        """Tell whether it is time for `what` again, and note that it was done."""
        if at_s < self._due_at_s.get(what, at_s):
            return False
        self._due_at_s[what] = at_s + every_s
        return True


def _guarded(ask: Callable[[], Asked]) -> Asked | Exception:
    """Return a policy's answer, or what it raised."""
    try:
        return ask()
    except Exception as error:  # broad on purpose: whatever a policy trips over, it alone is disabled
        return error


class _Rate:
    """A smoothed rate from a growing count."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._per_s: float | None = None

    def update(self, count: int, at_s: float) -> float | None:
        last, self._last = self._last, (count, at_s)
        if last is None or at_s <= last[1]:
            return self._per_s
        elapsed_s = at_s - last[1]
        now_per_s = (count - last[0]) / elapsed_s
        weight = 1 - 0.5 ** (elapsed_s / RATE_HALF_LIFE_S)
        self._per_s = now_per_s if self._per_s is None else self._per_s + weight * (now_per_s - self._per_s)
        return self._per_s


def _with_frontend(traffic: Traffic, snapshot: FrontendSnapshot) -> Traffic:
    """Count a request as present where either sees it: it may wait in the frontend, or have outlived it."""
    known = [count for count in (traffic.in_flight, snapshot.in_flight) if count is not None]
    return msgspec.structs.replace(traffic, in_flight=max(known, default=None))
