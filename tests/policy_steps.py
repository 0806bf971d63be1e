"""The controller's step under a policy, a second a tick; what is published is in force."""

from dynamo_poa.controller import step
from dynamo_poa.policies.running import unguarded
from dynamo_poa.tick import ControllerState, Observation, Settings
from dynamo_poa.values import TtftSample


class Steps:
    """Runs it; `fields` of a tick are of its observation."""

    def __init__(self, config, policy, static, *, shadow=None, guard=unguarded):
        self.settings = Settings(namespace="poa", config=config, policy=policy, static=static, shadow=shadow)
        self.state, self.current, self.at_s = ControllerState(), None, 1000.0
        self.guard = guard

    def tick(self, **fields):
        self.at_s += 1.0
        seen = Observation(
            wall_s=1.8e9 + self.at_s,
            monotonic_s=self.at_s,
            current=self.current,
            announced=self.current is not None,
            ttft=TtftSample(p50_s=0.1, p99_s=0.2, samples=100, fresh=True, source="decisions"),
            message_age_s=0.1,
            **fields,
        )
        self.state, effects = step(self.state, seen, self.settings, self.guard)
        self.current = effects.publish or self.current
        return effects
