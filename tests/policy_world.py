"""Worlds a policy can live in: requests whose times depend on the setting in force, views made of them."""

import heapq
import math
import random
from collections import deque

from dynamo_poa.decisions import Traffic
from dynamo_poa.policies.auto import candidates
from dynamo_poa.policies.protocol import View
from dynamo_poa.values import Regime, RequestOutcome, Setting

STATIC = Setting(0.0, 1.0)
TAU = Setting(0.7, 1.0)
TICK_S = 0.25


def only(*settings, gain=0.0):
    """Return a prediction under which nothing but these settings may be tried."""
    return {STATIC: 1.0} | dict.fromkeys(settings, 1.0 - gain)


class World:
    """Requests at a steady rate; time to first token and end as `times(setting, at_s, rng)` says.

    A tick: the policy answers, the answer is in force from the next tick on, the requests of the interval are
    decided under what is in force.
    """

    def __init__(self, policy, times, *, rate=40.0, seed=1, predicted=None, **view):
        self.policy, self.state, self.times = policy, policy.start(), times
        self.rate, self.rng = rate, random.Random(seed)
        self.predicted = only(TAU) if predicted is None else predicted
        self.view = {"regime": Regime.SATURATED, "ours": True} | view
        self.at_s, self.revision, self.since_s, self.arrived = 1000.0, 1, 0.0, 0
        self.in_force, self.wanted, self.pinned = STATIC, STATIC, None
        self.answers = []
        self.total_s = []
        self.running = []
        self.changes = ()  # from pair to pair of the last trial
        self.owed = 0.0

    def run(self, duration_s):
        """Let time pass; return the last answer."""
        until_s = self.at_s + duration_s
        while self.at_s < until_s:
            self.tick()
        return self.answers[-1]

    def run_until(self, reason, within_s=300.0):
        """Let time pass until the policy gives a reason; return how long it took."""
        since_s = self.at_s
        while self.tick().reason != reason:
            assert self.at_s - since_s < within_s, (reason, self.answers[-1])
        return self.at_s - since_s

    def tick(self):
        """Decide the interval's requests, then ask the policy."""
        wanted = self.wanted if self.pinned is None else self.pinned
        if wanted != self.in_force:
            self.in_force, self.since_s = wanted, self.at_s
            self.revision += 1
        self.owed += self.rate * TICK_S
        while self.owed >= 1:
            self.owed -= 1
            decided_at_s = self.at_s + self.rng.random() * TICK_S
            self.decide(decided_at_s)
        self.at_s += TICK_S
        outcomes = []
        while self.running and self.running[0][0] <= self.at_s:
            outcomes.append(heapq.heappop(self.running)[2])
        return self.ask(outcomes)

    def decide(self, decided_at_s):
        """Let one request arrive."""
        self.arrived += 1
        ttft_s, e2e_s = self.times(self.in_force, decided_at_s, self.rng)
        self.total_s.append(e2e_s)
        outcome = RequestOutcome(
            revision=self.revision,
            decided_at_s=decided_at_s,
            ttft_s=None if ttft_s is None else ttft_s,
            e2e_s=None if ttft_s is None else e2e_s,
            failed=ttft_s is None,
        )
        heapq.heappush(self.running, (decided_at_s + e2e_s, self.arrived, outcome))

    def ask(self, outcomes):
        """Show the policy what is to be seen."""
        view = View(
            at_s=self.at_s,
            static=STATIC,
            in_force=self.in_force,
            revision=self.revision,
            since_s=self.at_s - self.since_s,
            traffic=Traffic(arrival_rate=self.rate, tokens_mean=1000.0, arrived=self.arrived),
            calibrated=True,
            outcomes=tuple(outcomes),
            predicted=self.predicted,
            **self.view,
        )
        self.state, answer = self.policy.decide(self.state, view)
        if (trial := getattr(self.state, "trial", None)) is not None:
            self.changes = trial.changes
        self.wanted = answer.setting
        self.answers.append(answer)
        return answer

    @property
    def settings(self):
        """Return the settings that were answered, in order, each run of the same once."""
        return [
            now.setting
            for before, now in zip([None, *self.answers], self.answers, strict=False)
            if before is None or before.setting != now.setting
        ]


def noisy(base_s=0.2, end_s=1.0, *, tau=1.0, sigma=0.4, slot_sigma=0.0, seed=1):
    """Return times that are log-normal; under τ = 0.7 `tau` times as long.

    slot_sigma:  of a noise that all requests of two seconds share, as those do that meet the same queue
    """
    shared = random.Random(seed)
    common = {}

    def times(setting, at_s, rng):
        wave = common.setdefault(int(at_s // 2), math.exp(shared.gauss(0, slot_sigma)))
        factor = wave * (tau if setting.router_temperature == 0.7 else 1.0)
        return base_s * factor * rng.lognormvariate(0, sigma), end_s * factor * rng.lognormvariate(0, sigma)

    return times


class Queues(World):
    """Clients in a closed loop before workers that serve in turn, chosen as Dynamo does.

        cost of a worker = tokens that are not cached there + load there as the router knows it
        drawn by softmax of -cost / (range of costs) / τ

    refresh_s:  how old the router's word of the load gets; 0 is always fresh, and old news make it herd
    miss_s:     what a prompt costs a worker that does not hold its prefix; each worker has room for `room`
    """

    def __init__(
        self, policy, *, clients=16, workers=4, refresh_s=0.0, miss_s=0.0, groups=12, room=4, **rest
    ):
        super().__init__(policy, None, rate=0.0, **rest)
        self.clients = [(self.at_s + self.rng.random(), number) for number in range(clients)]
        heapq.heapify(self.clients)
        self.free_at_s = [self.at_s] * workers
        self.known_s, self.known_at_s = [0.0] * workers, -math.inf
        self.held = [deque(maxlen=room) for _ in range(workers)]
        self.refresh_s, self.miss_s, self.groups = refresh_s, miss_s, groups
        self.recent = deque()

    def tick(self):
        """Let every client whose answer is there ask again."""
        until_s = self.at_s + TICK_S
        while self.clients[0][0] < until_s:
            at_s, client = heapq.heappop(self.clients)
            self.serve(at_s, client)
            self.recent.append(at_s)
        while self.recent and self.recent[0] < until_s - 3.0:
            self.recent.popleft()
        self.rate = len(self.recent) / 3.0
        owed, self.owed = self.owed, -math.inf  # no arrivals beside the clients'
        answer = super().tick()
        self.owed = owed
        return answer

    def serve(self, at_s, client):
        """Send one request to a worker."""
        if at_s - self.known_at_s >= self.refresh_s:
            self.known_at_s = at_s
            self.known_s = [max(free_s - at_s, 0.0) for free_s in self.free_at_s]
        group = int(self.groups * self.rng.random() ** 2)
        miss_s = [0.0 if group in held else self.miss_s for held in self.held]
        costs = [
            load + self.in_force.overlap_weight * miss
            for load, miss in zip(self.known_s, miss_s, strict=True)
        ]
        worker = self.pick(costs)
        start_s = max(at_s, self.free_at_s[worker])
        first_s = start_s + 0.02 + miss_s[worker] + self.rng.expovariate(1 / 0.04)
        self.free_at_s[worker] = first_s
        if group in self.held[worker]:
            self.held[worker].remove(group)
        self.held[worker].append(group)
        end_s = first_s + 0.1
        self.arrived += 1
        self.total_s.append(end_s - at_s)
        outcome = RequestOutcome(
            revision=self.revision, decided_at_s=at_s, ttft_s=first_s - at_s, e2e_s=end_s - at_s
        )
        heapq.heappush(self.running, (end_s, self.arrived, outcome))
        heapq.heappush(self.clients, (end_s + self.rng.expovariate(1 / 0.05), client))

    def pick(self, costs):
        """Draw a worker; Dynamo breaks ties at random."""
        low, spread = min(costs), max(costs) - min(costs)
        temperature = self.in_force.router_temperature
        if not temperature or not spread:
            return self.rng.choice([worker for worker, cost in enumerate(costs) if cost == low])
        weights = [math.exp(-(cost - low) / spread / temperature) for cost in costs]
        return self.rng.choices(range(len(costs)), weights)[0]


def everything(setting=STATIC):
    """Return a prediction by which all candidates are as good as what is in force, from any setting."""
    known, new = {setting}, {setting}
    while new:
        new = {found for one in new for found in candidates(one, STATIC)} - known
        known |= new
    return dict.fromkeys(known, 1.0)
