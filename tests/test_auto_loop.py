"""Policy auto in the real control loop, on a simulated graph: records, predictions, stale data, pins."""

from simulated_graph import SILENT, Graph, ticking

from dynamo_poa.config import PolicyConfig
from dynamo_poa.values import ParamsKind, Pin, Setting, WorkerKey
from dynamo_poa.wire import ForwardPass

AUTO = PolicyConfig(name="auto")
STATIC = (0.2, 0.9)


def calibrated(graph, kv_token_s=0.0):
    """Let both workers have done decode passes: 10 ms however many requests there are."""
    for number in range(20):
        kv_tokens = 100 * (number % 7)
        wall_s = 0.01 + kv_token_s * kv_tokens
        for card in SILENT:
            done = ForwardPass(
                card.worker_id, 0, number, wall_s, 0, 0, 0, 1 + number % 4, kv_tokens, 0, 0, 0, 0
            )
            graph.book.observe(WorkerKey(card.worker_id, 0), card, done, graph.clock.monotonic_s())
    return graph


def graph(factor, *, kv_token_s=0.0, **config):
    """Return a graph whose TTFT is `factor` times as long under τ = 0.7."""
    return calibrated(
        Graph(lambda _, params: 0.1 * (factor if params.router_temperature == 0.7 else 1.0), **config),
        kv_token_s,
    )


async def until(g, condition, within_s=200):
    """Let time pass until something is so."""
    for _ in range(within_s * 4):
        await g.run(0.25, 40)
        if condition():
            return
    raise AssertionError(g.last.policy)


async def test_a_temperature_that_helps_is_found_kept_and_published():
    """From requests on the wire to the record in the channel; one published change per turn of the trial."""
    async with ticking(graph(0.8, policy=AUTO)) as g:
        await until(g, lambda: g.last.policy.reason == "kept", within_s=500)
        await g.run(5, 40)
    current = g.channel.current
    assert (current.router_temperature, current.overlap_weight, current.kind) == (0.7, 0.9, ParamsKind.POLICY)


async def test_a_temperature_that_harms_is_left_and_it_says_that_nothing_is_better():
    """Every candidate is tried once; what remains is the static setting, and the reason why."""
    async with ticking(graph(1.5, policy=AUTO)) as g:
        await until(g, lambda: g.last.policy.reason == "no_candidate_better", within_s=900)
        tried = {params.setting for _, params in g.channel.written}
    assert (g.channel.current.router_temperature, g.channel.current.overlap_weight) == STATIC
    harmed_s = [at_s for at_s, params in g.channel.written if params.router_temperature == 0.7]
    assert len(harmed_s) == 1
    assert len(tried) > 2


async def test_without_calibrated_models_nothing_is_tried():
    """No forward pass was ever heard of: nothing to predict by."""
    g = Graph(lambda *_: 0.1, policy=AUTO)
    async with ticking(g):
        await g.run(60, 40)
    assert set(g.written) == {(*STATIC, "policy")}
    assert g.last.policy.reason == "no_prediction"


async def test_on_stale_data_a_candidate_under_trial_is_not_held():
    """Nobody sees what it does to users: the last good setting is published, and the trial says nothing."""
    async with ticking(graph(0.8, policy=AUTO, stale_s=5.0)) as g:
        await until(g, lambda: g.channel.current.setting != Setting(*STATIC))
        await g.run(10, 40, router_heard=False)
        assert (g.channel.current.router_temperature, g.channel.current.overlap_weight) == STATIC
        await g.run(0.5, 40)
        assert g.last.policy.reason == "interrupted"


async def test_a_pin_in_a_trial_wins_at_once_and_what_was_good_returns_after_it():
    """`set` wins always; the trial is over without a verdict."""
    async with ticking(graph(0.8, policy=AUTO)) as g:
        await until(g, lambda: g.last.policy.reason == "trial")
        await g.run(6, 40)
        g.loop.pin(Pin(router_temperature=0.1, overlap_weight=0.2))
        await g.run(30, 40)
        assert g.channel.current.kind is ParamsKind.PIN
        assert g.last.policy.reason == "interrupted"
        g.loop.release()
        await g.run(0.5, 40)
        assert (g.channel.current.router_temperature, g.channel.current.overlap_weight) == STATIC


async def test_in_shadow_it_tells_what_it_would_try_and_what_that_would_gain():
    """Beside the active policy; what is in force does not move."""
    shadowed = graph(0.8, kv_token_s=1e-5, policy=PolicyConfig(name="static", shadow="auto"))
    async with ticking(shadowed) as g:
        await until(g, lambda: g.last.shadow.setting != Setting(*STATIC))
    assert g.last.shadow.reason == "trial"
    assert g.last.shadow.setting == Setting(0.0, 0.9)  # always the less loaded: what the model says is best
    assert 0 < g.last.shadow.predicted_gain_frac < 0.05
    assert set(g.written) == {(*STATIC, "policy")}
