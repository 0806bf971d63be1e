"""When snapshots are priced: beside the ticks, which never wait for it.

Owns: what is looked at in one instant; the one job at a time in a worker thread; the latest estimates.
Does not own: what is computed (latency.py, snapshot.py, estimator.py, frozen.py, counterfactual.py), when it
              is due (loop.py).
Invariant: a job that takes longer than the time to the next costs snapshots, which are counted, and no tick.
Source: measured: scipy's assignment solver releases the interpreter's lock, so ticks go on beside it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from dynamo_poa import counterfactual
from dynamo_poa.decisions import DecisionLog
from dynamo_poa.estimator import MarginalEstimator
from dynamo_poa.flight import InFlight
from dynamo_poa.frozen import METHOD, frozen_estimate
from dynamo_poa.latency import LatencyBook
from dynamo_poa.load import WorkerState
from dynamo_poa.one_job import OneJob
from dynamo_poa.snapshot import Snapshot, foreign_tokens, price, take_snapshot
from dynamo_poa.values import Estimate, Role, Setting, WorkerKey, WorkerLatency

Found = tuple[Mapping[WorkerKey, WorkerLatency], Estimate, Estimate, Mapping[Setting, float]]
Run = Callable[[Callable[[], Found]], Awaitable[Found]]


def snapshots_at(
    at_s: float,
    workers: Iterable[WorkerState],
    latencies: Mapping[WorkerKey, WorkerLatency],
    running: Mapping[Role, Sequence[InFlight]],
) -> list[Snapshot]:
    """Return one snapshot of each leg, all of one instant.

    Where all of a role have ceased to report passes, its models fade into one curve for all, by which any
    placement would be the best: PoA-hat then is not 1 but unknown.
    """
    known = list(workers)
    reporting = {worker.card.role for worker in known if worker.running_prefill_requests is not None}
    latencies = {key: latency for key, latency in latencies.items() if latency.role in reporting}
    cards = {worker.key.worker_id: worker.card for worker in known}
    return [
        take_snapshot(role, at_s, requests, latencies, cards, foreign_tokens(known, requests))
        for role, requests in running.items()
    ]


class Pricer:
    """Looks at one instant after another and prices each.

    latencies:         what is known of each worker's speed, as of the last look
    marginal, frozen:  the latest estimates
    predicted:         mean cost of the latest decisions under each setting that was asked about, in seconds
    """

    def __init__(
        self,
        window_s: float,
        book: LatencyBook,
        run: Run = asyncio.to_thread,
        *,
        block_size: int = 16,
        output_tokens: Mapping[Role, float] | None = None,
        scale_is_weight: bool = False,
    ) -> None:
        """Price in a worker thread, or as `run` does it.

        Args:  output_tokens, scale_is_weight: as counterfactual.Model has them; the first may change later.
        """
        self.latencies: Mapping[WorkerKey, WorkerLatency] = {}
        self.marginal = Estimate(reason="no decisions")
        self.frozen = Estimate(reason="no decisions", method=METHOD)
        self.predicted: Mapping[Setting, float] = {}
        self._estimator = MarginalEstimator(window_s)
        self._book = book
        self._run = run
        self._block_size = block_size
        self._output_tokens = {} if output_tokens is None else output_tokens
        self._scale_is_weight = scale_is_weight
        self._job = OneJob("pricing")

    def look(
        self,
        at_s: float,
        workers: Sequence[WorkerState],
        decisions: DecisionLog,
        settings: Sequence[Setting] = (),
    ) -> None:
        """Note what is in flight now, and begin to fit the latency models and to price it.

        Args:  settings: what the latest decisions are priced under.
        """
        if not self._job.is_free():
            return
        running, windows = decisions.running(), decisions.windows()
        arrivals_per_s = decisions.traffic(at_s).arrival_rate or 0.0

        def job() -> Found:
            latencies = self._book.fit(at_s, [(worker.key, worker.card.role) for worker in workers])
            self._estimator.add(map(price, snapshots_at(at_s, workers, latencies, running)))
            model = counterfactual.Model(
                latencies=latencies,
                cards={worker.key.worker_id: worker.card for worker in workers},
                block_size=self._block_size,
                output_tokens=dict(self._output_tokens),
                arrivals_per_s=arrivals_per_s,
                scale_is_weight=self._scale_is_weight,
            )
            predicted = counterfactual.predict(windows, settings, model) if settings else {}
            return latencies, self._estimator.estimate(at_s), frozen_estimate(windows), predicted

        self._job.start(self._take(job))

    @property
    def skipped(self) -> int:
        """Return how many instants were not priced because the one before took too long."""
        return self._job.skipped

    def take_failure(self) -> BaseException | None:
        """Return what a job that has ended tripped over, once; there is no estimate until one succeeds."""
        error = self._job.take_failure()
        if error is not None:
            self.marginal = Estimate(reason=f"pricing failed: {error!r}")
            self.frozen = Estimate(reason=self.marginal.reason, method=METHOD)
            self.predicted = {}
        return error

    @property
    def unmeasured(self) -> int:
        """Return how many passes had work and no duration."""
        return self._book.unmeasured

    async def settled(self) -> None:
        """Wait until nothing is being priced; for tests and measurements, no tick does."""
        await self._job.settled()

    async def aclose(self) -> None:
        """Wait for nothing more; a thread that computes ends by itself."""
        await self._job.aclose()

    async def _take(self, job: Callable[[], Found]) -> None:
        self.latencies, self.marginal, self.frozen, self.predicted = await self._run(job)
