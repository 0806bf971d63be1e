"""How caches follow a change of ω: phases on made-up ticks, exact shares."""

import pytest

from dynamo_poa.coupling import CacheSwap
from dynamo_poa.following import PHASE_S, SETTLED_S, Following, FollowState, Seen, follow, turnover
from dynamo_poa.values import Role, Selection, Setting, WorkerCard

TICK_S = 0.25
NEAR, FAR = Setting(0.0, 1.0), Setting(0.0, 0.5)


class World:
    """Ticks four times a second; each brings so many requests of 100 tokens, a share of them cached."""

    def __init__(self, *, requests_a_tick: int = 1) -> None:
        self.following = Following()
        self.requests_a_tick = requests_a_tick
        self.ticks = self.prompts = self.cached = self.stored = 0
        self.duplication: float | None = None
        self.pool_blocks: int | None = 1000

    def tick(self, setting: Setting | None, *, cached: int = 0, stored: int = 0) -> CacheSwap | None:
        """Let a tick see what came since the one before: `cached` tokens of each request."""
        self.ticks += 1
        self.prompts += self.requests_a_tick
        self.cached += cached * self.requests_a_tick
        self.stored += stored
        return self.following.observe(
            Seen(
                at_s=self.ticks * TICK_S,
                wall_s=1000 + self.ticks * TICK_S,
                setting=setting,
                prompts_seen=self.prompts,
                prompt_tokens_seen=100 * self.prompts,
                cached_tokens_seen=self.cached,
                stored_blocks=self.stored,
                pool_blocks=self.pool_blocks,
                duplication=self.duplication,
            )
        )

    def run(self, seconds: float, setting: Setting | None, **each: int) -> CacheSwap | None:
        found = None
        for _ in range(round(seconds / TICK_S)):
            found = self.tick(setting, **each)
        return found


def test_a_change_of_overlap_weight_is_followed_through_its_three_phases() -> None:
    """Before: 20 s; during: until the pool's 1000 blocks were stored, 5 s here; after: 20 s."""
    world = World()
    world.run(30.0, NEAR, cached=10)  # older than the phase before
    world.duplication = 1.5
    assert world.run(25.0, NEAR, cached=80) is None
    at_s = 1000 + 55.25
    begun = world.tick(FAR, cached=20, stored=50)
    assert begun == CacheSwap(
        at_s=at_s,
        overlap_weight_before=1.0,
        overlap_weight_after=0.5,
        hit_frac_before=0.8,
        duplication_before=1.5,
    )
    assert world.run(4.5, FAR, cached=20, stored=50) == begun
    turned = world.tick(FAR, cached=20, stored=50)  # the twentieth 50
    assert turned == CacheSwap(
        at_s=at_s,
        overlap_weight_before=1.0,
        overlap_weight_after=0.5,
        hit_frac_before=0.8,
        hit_frac_during=0.2,
        duplication_before=1.5,
    )
    world.duplication = 3.25
    assert world.run(PHASE_S - TICK_S, FAR, cached=50, stored=50) == turned
    settled = world.tick(FAR, cached=50)
    assert settled == CacheSwap(
        at_s=at_s,
        overlap_weight_before=1.0,
        overlap_weight_after=0.5,
        hit_frac_before=0.8,
        hit_frac_during=0.2,
        hit_frac_after=0.5,
        duplication_before=1.5,
        duplication_after=3.25,
    )
    assert world.run(60.0, FAR, cached=99, stored=50) == settled


@pytest.mark.parametrize("pool_blocks", [10**9, None])
def test_caches_that_do_not_turn_over_have_followed_after_half_a_minute(pool_blocks: int | None) -> None:
    """A pool larger than what is stored, or of a size that no card says: SETTLED_S."""
    world = World()
    world.pool_blocks = pool_blocks
    world.run(20.0, NEAR, cached=80)
    found = world.run(SETTLED_S - TICK_S, FAR, cached=30, stored=5)
    assert found is not None
    assert found.hit_frac_during is None
    found = world.tick(FAR, cached=30, stored=5)
    assert found is not None
    assert (found.hit_frac_before, found.hit_frac_during, found.hit_frac_after) == (0.8, 0.3, None)


def test_phases_of_too_few_requests_have_no_share() -> None:
    """Fewer than 20 requests: unknown, never 0. A second of three a tick is 12, two are 24."""
    world = World(requests_a_tick=3)
    world.run(1.0, NEAR, cached=80)
    found = world.run(1.0, FAR, cached=20, stored=250)
    assert found is not None
    assert (found.hit_frac_before, found.hit_frac_during) == (None, None)
    found = world.run(PHASE_S, FAR, cached=40)
    assert found is not None
    assert (found.hit_frac_before, found.hit_frac_during, found.hit_frac_after) == (None, None, 0.4)


def test_a_silent_pool_has_no_share_in_any_phase() -> None:
    """No request at all: nothing to divide."""
    world = World(requests_a_tick=0)
    world.run(20.0, NEAR)
    assert world.run(60.0, FAR) == CacheSwap(
        at_s=1020.25, overlap_weight_before=1.0, overlap_weight_after=0.5
    )


@pytest.mark.parametrize(
    ("now", "swapped"),
    [
        (Setting(0.7, 1.0), False),
        (Setting(0.0, 1.0, prefill_load_scale=0.5), False),
        (Setting(0.0, 1.0, selection=Selection.MARGINAL), True),
        (Setting(0.0, 0.9), True),
    ],
)
def test_only_a_setting_that_leads_prompts_elsewhere_is_a_swap(now: Setting, swapped: bool) -> None:
    """ω, or who chooses; τ and the scale of queued work do not move prefixes."""
    world = World()
    world.run(20.0, NEAR, cached=80)
    found = world.tick(now, cached=80)
    assert (found is not None) is swapped
    if found is not None:
        weights = (found.overlap_weight_before, found.overlap_weight_after)
        assert (weights, found.hit_frac_before) == ((1.0, now.overlap_weight), 0.8)


def test_the_first_setting_follows_none() -> None:
    """Before the controller knows a setting nothing has changed; one not known later is no change."""
    world = World()
    assert world.run(20.0, None, cached=80) is None
    assert world.run(20.0, NEAR, cached=80) is None
    assert world.tick(None, cached=80) is None
    found = world.tick(FAR, cached=80)
    assert found is not None
    assert (found.overlap_weight_before, found.hit_frac_before) == (1.0, 0.8)


def test_a_change_overtaken_by_another_makes_room_for_it() -> None:
    """The second one's `before` begins at the first; the first one's end is not waited for."""
    world = World()
    world.run(20.0, NEAR, cached=80)
    world.run(6.0, FAR, cached=20)
    found = world.tick(NEAR, cached=60)
    assert found == CacheSwap(
        at_s=1026.25, overlap_weight_before=0.5, overlap_weight_after=1.0, hit_frac_before=0.2
    )


def test_what_is_carried_is_bounded_however_fast_the_ticks() -> None:
    """Twenty ticks a second for a minute: a mark a second is kept, twenty seconds back."""
    state = FollowState()
    for number in range(1200):
        state, _ = follow(state, Seen(at_s=number * 0.05, wall_s=0.0, setting=NEAR))
    assert len(state.past) <= 22
    assert state.past[-1].at_s == 1199 * 0.05
    assert 19.0 <= state.past[-1].at_s - state.past[0].at_s <= PHASE_S


def stored() -> list[tuple[WorkerCard, int]]:
    rows = ((1, Role.PREFILL, 100, 100), (2, Role.PREFILL, 50, 0), (3, Role.DECODE, 999, 18))
    return [
        (WorkerCard(worker_id=worker_id, role=role, kv_block_size=16, total_kv_blocks=total_blocks), blocks)
        for worker_id, role, total_blocks, blocks in rows
    ]


def test_what_the_ranks_that_compute_prompts_have_stored_and_can_hold_adds_up() -> None:
    """One that has said nothing has stored nothing, and has room all the same."""
    assert turnover(stored()) == (100, 150)
    assert turnover([]) == (0, None)


def test_one_cache_of_unknown_size_leaves_the_pool_s_unknown() -> None:
    """Half a pool's capacity would pass for all of it, and the caches for turned over too early."""
    card = WorkerCard(worker_id=4, role=Role.AGGREGATED, kv_block_size=16)
    assert turnover([*stored(), (card, 0)]) == (100, None)


def test_caches_that_have_never_shown_anything_have_no_hit_share() -> None:
    """Case E6: where the prefix cache is off nothing is ever found, which is unknown rather than 0."""
    world = World()
    world.run(25.0, NEAR)
    swap = world.run(60.0, FAR, stored=50)
    assert swap == CacheSwap(at_s=1025.25, overlap_weight_before=1.0, overlap_weight_after=0.5)
