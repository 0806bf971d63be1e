"""Which speeds workers are taken to have: those of the controller's last good word, while it is fresh.

Owns: refusing bad or old messages, the lease, and the look-up of a worker's curve: its own, else its pool's.
Does not own: the speeds (latency.py, in the controller), the message (wire.py), what is done with it.
Invariant: what is in force is one whole message. A refused one changes nothing, and renews no lease.
Source: contract: wire.Coefficients.
"""

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from dynamo_poa.bus import Bus
from dynamo_poa.clock import Clock
from dynamo_poa.complaints import Complaints
from dynamo_poa.errors import Unpicked, WireError
from dynamo_poa.marginal import OUTPUT_TOKENS
from dynamo_poa.values import Curve, Role, WorkerKey
from dynamo_poa.wire import Coefficients, decode_coefficients, subject


class Speeds:
    """One message, ready to look up."""

    def __init__(self, message: Coefficients) -> None:
        self.message = message
        self.routers = max(message.routers, 1)
        self._curves = {
            WorkerKey(worker.worker_id, worker.dp_rank): worker.curve for worker in message.workers
        }
        self._pools = message.pools

    def curve(self, key: WorkerKey, role: Role) -> Curve | None:
        """Return a worker's curve, its pool's where it has none, None where nothing is known."""
        own = self._curves.get(key)
        if own is not None:
            return own
        pool = self._pools.get(role)
        return None if pool is None else pool.curve

    def output_tokens(self, role: Role) -> float:
        """Return how many tokens a request of the pool makes, mean."""
        pool = self._pools.get(role)
        mean = None if pool is None else pool.output_tokens_mean
        return OUTPUT_TOKENS if mean is None else max(mean, 1.0)


class CoefficientsHolder:
    """What is in force. Read on the request path.

    refused:  messages by reason
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.refused: Counter[str] = Counter()
        self._clock_s = clock_s
        self._held: Speeds | None = None
        self._received_at_s = 0.0
        self._listeners: list[Callable[[Speeds], None]] = []

    @property
    def revision(self) -> int | None:
        """Return that of the last good message, None before the first."""
        return None if self._held is None else self._held.message.revision

    def latest_output_tokens(self, role: Role) -> float:
        """Return how many tokens a request of a pool makes, by the last good message, however old."""
        return OUTPUT_TOKENS if self._held is None else self._held.output_tokens(role)

    def on_taken(self, listener: Callable[[Speeds], None]) -> None:
        """Call back at each message that is taken over."""
        self._listeners.append(listener)

    def speeds(self) -> Speeds:
        """Return what is in force.

        Raises:  Unpicked when nothing has come, or not for so long that it may hold no more.
        """
        held = self._held
        if held is None:
            raise Unpicked("no_coefficients")
        if self._stale(held):
            raise Unpicked("stale_coefficients")
        return held

    def offer(self, message: Coefficients) -> None:
        """Take a message over.

        A controller's revisions grow. One that starts again counts from the beginning, mostly under another
        id: its word is taken, for it is the newest there is. Under the same it has to wait for the lease.

        Raises:  WireError, reason `stale_revision`, for one that is older than what is in force.
        """
        held = self._held
        if held is not None and held.message.controller_id == message.controller_id and not self._stale(held):
            before = held.message.revision
            if message.revision <= before:
                raise WireError("stale_revision", f"revision = {message.revision}: must be > {before}")
        self._held, self._received_at_s = Speeds(message), self._clock_s()
        for listener in self._listeners:
            listener(self._held)

    def _stale(self, held: Speeds) -> bool:
        return self._clock_s() - self._received_at_s >= held.message.lease_s

    def offer_bytes(self, data: bytes) -> WireError | None:
        """Decode and take over; return why not, counted."""
        try:
            self.offer(decode_coefficients(data))
        except WireError as refusal:
            self.refused[refusal.reason] += 1
            return refusal
        return None


class CoefficientsSubscriber:
    """Feeds a holder from the bus, which keeps the subscription from then on. Enter it before serving."""

    def __init__(self, bus: Bus, namespace: str, holder: CoefficientsHolder, clock: Clock) -> None:
        self._bus, self._subject, self._holder = bus, subject(namespace, "coefficients"), holder
        self._complaints = Complaints(clock)

    async def __aenter__(self) -> Self:
        """Subscribe."""
        self._bus.subscribe(self._subject, self._on_message)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it to the bus, which closes after."""

    def _on_message(self, _subject: str, data: bytes) -> None:
        refusal = self._holder.offer_bytes(data)
        if refusal is not None:
            self._complaints.say("poa.coefficients.refused", reason=refusal.reason, detail=refusal.detail)
