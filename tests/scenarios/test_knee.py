"""The real controller at the knee, where the workers' own figures swing around a threshold (case D1)."""

import itertools

import pytest
from dynamo_messages import W1, W2, Sender, card, fp, km
from simulated_graph import Graph, ticking

from dynamo_poa.evidence import SPREAD
from dynamo_poa.values import Regime

TICK_S = 0.25
TOKEN_S = 0.0001  # of the workers' passes
# A unit of queue on each of two ranks: half of the effective service time, E[s^2] / E[s], of requests of 64
# tokens, with the spread that is assumed where only their mean is known.
UNIT_TOKENS = 64 * SPREAD / 2
UNLOADED_S = 0.02  # a decode iteration
FIGURES = ("queue, to transition", "queue, to saturated", "kv blocks", "iteration")


class Plant:
    """Two workers whose queue, occupancy and iteration time a test sets, and steady healthy traffic."""

    def __init__(self):
        self.graph = Graph(lambda in_flight, params: 0.1, cards=[card(W1), card(W2)])
        clock = self.graph.clock
        self.sender = Sender(self.graph.fleet, "poa-workers", clock.wall_s() - clock.monotonic_s())
        self.limits = self.graph.config.regime
        self._pass = 0

    async def ticks(self, count, *, queue_units=0.0, kv_frac=0.1, iteration_s=UNLOADED_S):
        """Let each worker report three passes a tick: prefill of two sizes, and decode."""
        for _ in range(count):
            now_s = self.graph.clock.monotonic_s()
            tokens = round(queue_units * UNIT_TOKENS)
            queued = {"qn": -(-tokens // 64), "qt": tokens}
            for worker_id in (W1, W2):
                said = str(worker_id)
                for number, (wall_time_s, work) in enumerate(
                    (
                        (500 * TOKEN_S, {"np": 8, "pt": 500}),
                        (250 * TOKEN_S, {"np": 4, "pt": 250}),
                        (iteration_s, {"nd": 1}),
                    ),
                    start=1,
                ):
                    done = fp(worker_id, self._pass + number, wall_time_s, **work, **queued)
                    self.sender.send(said, done, now_s)
                self.sender.send(said, km(worker_id, None, None, round(kv_frac * 4096)), now_s)
            self._pass += 3
            await self.graph.run(TICK_S, 20)

    @property
    def changes(self):
        """Return when the regime changed, and whether upwards."""
        pairs = itertools.pairwise(self.graph.records)
        return [
            (after.at_s, after.regime.level > before.regime.level)
            for before, after in pairs
            if before.regime is not after.regime
        ]


def swings(limits):
    """Return each figure's lower threshold as a setting."""
    return {
        "queue, to transition": {"queue_units": limits.queue_transition},
        "queue, to saturated": {"queue_units": limits.queue_saturated},
        "kv blocks": {"kv_frac": limits.kv_frac},
        "iteration": {"iteration_s": limits.iteration_factor * UNLOADED_S},
    }


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("ticks", [3, 12])
async def test_a_figure_that_swings_around_its_threshold_changes_little(figure, ticks):
    """D1a: 0.9 and 1.1 x the threshold every 3 ticks for 120 ticks: at most 4 changes, none within the dwell.

    But for two steps up in a row (regime.py). Every 12 ticks as well: the case's ticks take a second.
    """
    plant = Plant()
    async with ticking(plant.graph):
        await plant.ticks(80)
        ((setting, threshold),) = swings(plant.limits)[figure].items()
        for swing in range(120 // 3):
            await plant.ticks(ticks, **{setting: threshold * (1.1 if swing % 2 else 0.9)})
    assert len(plant.changes) <= 4
    for (earlier_s, up), (later_s, up_again) in itertools.pairwise(plant.changes):
        assert later_s - earlier_s >= plant.limits.dwell_s or (up and up_again)


@pytest.mark.parametrize("figure", FIGURES)
async def test_a_figure_that_stays_over_its_threshold_is_heard(figure):
    """Control: what the swings are around is a threshold."""
    plant = Plant()
    async with ticking(plant.graph):
        await plant.ticks(80)
        ((setting, threshold),) = swings(plant.limits)[figure].items()
        await plant.ticks(80, **{setting: 0.7 * threshold})
        under = plant.graph.last.regime
        await plant.ticks(160, **{setting: 1.1 * threshold})
    expected = {"queue, to saturated": (Regime.TRANSITION, Regime.SATURATED)}
    assert (under, plant.graph.last.regime) == expected.get(figure, (Regime.BELOW, Regime.TRANSITION))
    assert plant.graph.last.driver == f"aggregated.{figure.split(',')[0].replace(' ', '_')}"


@pytest.mark.parametrize("figure", ["queue, to saturated", "iteration"])
async def test_a_spike_of_a_single_tick_changes_nothing(figure):
    """D1d: 100 x the threshold for one tick."""
    plant = Plant()
    async with ticking(plant.graph):
        await plant.ticks(80)
        ((setting, threshold),) = swings(plant.limits)[figure].items()
        await plant.ticks(1, **{setting: 100 * threshold})
        await plant.ticks(120)
    assert plant.changes == []


async def test_after_overload_workers_with_odd_slow_passes_are_below_again():
    """D1c: queues and slow iterations for 60 s, then healthy but for a slow pass now and then."""
    plant = Plant()
    async with ticking(plant.graph):
        await plant.ticks(80)
        await plant.ticks(
            240, queue_units=3 * plant.limits.queue_saturated, kv_frac=0.95, iteration_s=8 * UNLOADED_S
        )
        assert plant.graph.last.regime is Regime.SATURATED
        assert plant.graph.regimes == [Regime.BELOW, Regime.TRANSITION, Regime.SATURATED]
        healthy_s = plant.graph.last.at_s
        for burst in range(4 * 200 // 50):
            await plant.ticks(49)
            await plant.ticks(1, iteration_s=(30 if burst else 1) * UNLOADED_S)
    assert plant.graph.regimes[3:] == [Regime.TRANSITION, Regime.BELOW]
    assert plant.changes[-1][0] - healthy_s <= 3 * plant.limits.dwell_s
