"""What Dynamo's bytes become, and how bad ones are refused."""

import math
from typing import Any

import msgspec
import pytest
from dynamo_messages import (
    W1,
    W2,
    bodies,
    cl,
    envelope,
    fp,
    km,
    recorded_cards,
    recording,
    rm,
    st,
    subject,
)
from hypothesis import given, settings
from hypothesis import strategies as st_

from dynamo_poa.errors import WireError
from dynamo_poa.values import Role, WorkerCard
from dynamo_poa.wire import (
    MAX_MESSAGE_BYTES,
    ForwardPass,
    KvCleared,
    KvEvent,
    KvMetrics,
    KvRemoved,
    KvStored,
    Route,
    Tier,
    card_from_mdc,
    decode_dynamo,
    parse_subject,
)

TOPICS = ("kv-events", "kv_metrics", "forward-pass-metrics", "active_sequences_events")
REASONS = {"subject", "too_large", "not_msgpack", "envelope", "payload", "version", "impossible_value"}


def encoded(message: tuple[str, Any]) -> tuple[str, bytes]:
    topic, body = message
    return subject(topic), envelope(topic, msgspec.msgpack.encode(body), 5, 9, 1000.25)


def reason_of(where: str, data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode_dynamo(where, data)
    return caught.value.reason


def test_envelope_and_subject_say_where_a_message_came_from() -> None:
    """Measured: subject of seven tokens, five envelope fields, published_at in milliseconds."""
    message = decode_dynamo(*encoded(km(W1, None, None, 25)))
    assert (message.namespace, message.component, message.topic) == ("ns", "backend", "kv_metrics")
    assert (message.publisher_id, message.sequence, message.published_at_s) == (5, 9, 1000.25)


def test_kv_metrics_keep_null_apart_from_zero_and_ids_exact() -> None:
    """Contract: absent is not zero; worker ids are unsigned 64-bit."""
    assert decode_dynamo(*encoded(km(W2, 0, None, None, dp=3))).body == KvMetrics(W2, 3, 0, None, None)


def test_forward_pass_joins_its_decimal_string_id_as_a_number() -> None:
    """Measured: worker_id is a string in this topic alone; units are seconds, tokens and requests."""
    _, body = fp(W2, 7, 0.05, np=4, pt=512, nd=16, qn=20, qt=2560)
    body["scheduled_requests"] |= {"sum_prefill_kv_tokens": 64, "sum_decode_kv_tokens": 900}
    body["queued_requests"] |= {"num_decode_requests": 1, "sum_decode_kv_tokens": 254}
    assert decode_dynamo(*encoded(("forward-pass-metrics", body))).body == ForwardPass(
        worker_id=W2,
        dp_rank=0,
        counter_id=7,
        wall_time_s=0.05,
        prefill_requests=4,
        prefill_tokens=512,
        prefill_kv_tokens=64,
        decode_requests=16,
        decode_kv_tokens=900,
        queued_prefill_requests=20,
        queued_prefill_tokens=2560,
        queued_decode_requests=1,
        queued_decode_kv_tokens=254,
    )


def test_kv_events_come_in_order_with_tier_and_parent() -> None:
    """Measured: an array of events; `cleared` is a bare string."""
    batch = st(W1, 3, 12, [13, 14], tier="disk")[1] + rm(W1, 4, [13])[1] + cl(W1, 5, dp=1)[1]
    assert decode_dynamo(*encoded(("kv-events", batch))).body == (
        KvEvent(W1, 0, 3, Tier.DISK, KvStored(12, (13, 14), (13, 14))),
        KvEvent(W1, 0, 4, Tier.DEVICE, KvRemoved((13,))),
        KvEvent(W1, 1, 5, Tier.DEVICE, KvCleared()),
    )


def test_signed_hashes_are_the_same_blocks_as_unsigned_ones() -> None:
    """Case E4: int64 forms are bit-cast; 0 and small numbers are blocks too."""
    hashes = [
        14840505966882773591,
        -3606238106826778025,
        9223372036854775808,
        18446744073709551615,
        -1,
        100,
        0,
    ]
    body = decode_dynamo(*encoded(st(W2, 1, -5, hashes))).body
    assert isinstance(body, tuple)
    unsigned = (14840505966882773591, 14840505966882773591, 2**63, 2**64 - 1, 2**64 - 1, 100, 0)
    assert body[0].data == KvStored(18446744073709551611, unsigned, unsigned)


def test_fields_of_newer_versions_are_ignored() -> None:
    """Contract: unknown keys are tolerated everywhere, e.g. `residency_domain`, `scheduler_load_scope`."""
    metrics = km(W1, 1, 2, None)
    metrics[1]["scheduler_load_scope"] = "local"
    assert decode_dynamo(*encoded(metrics)).body == KvMetrics(W1, 0, 1, 2, None)
    events = rm(W1, 1, [9])
    events[1][0]["residency_domain"] = {"any": ["thing"]}
    assert decode_dynamo(*encoded(events)).body == (KvEvent(W1, 0, 1, Tier.DEVICE, KvRemoved((9,))),)


def test_synchronisation_between_routers_is_known_and_not_decoded() -> None:
    """Measured: `active_sequences_events` appears with replica sync; it is no error."""
    data = envelope("active_sequences_events", b"\xc1 never looked at", 1, 0, 0.0)
    assert decode_dynamo(subject("active_sequences_events"), data).body is None


@pytest.mark.parametrize("wall_time", [-0.01, 1795951683.6, 3600.5, math.nan, math.inf])
def test_an_impossible_duration_is_refused_with_its_own_reason(wall_time: float) -> None:
    """Case S7: an instant sent as a duration, or a negative one, is rejected and not clamped."""
    assert reason_of(*encoded(fp(W1, 1, wall_time, nd=8))) == "impossible_value"


@pytest.mark.parametrize("wall_time", [0.0, 3600.0])
def test_durations_up_to_an_hour_are_taken(wall_time: float) -> None:
    """Case S7: 0.0 with decodes scheduled is odd but possible."""
    body = decode_dynamo(*encoded(fp(W1, 1, wall_time, nd=8))).body
    assert isinstance(body, ForwardPass)
    assert body.wall_time_s == wall_time


@pytest.mark.parametrize("stripped", [False, True])
def test_another_version_of_forward_pass_metrics_is_named_as_such(stripped: bool) -> None:
    """Rule: fields may mean something else there, also where they happen to be present."""
    topic, body = fp(W1, 1, 0.05)
    body["version"] = 2
    if stripped:
        del body["queued_requests"]
    assert reason_of(*encoded((topic, body))) == "version"


@pytest.mark.parametrize(
    "where",
    [
        "namespace.ns.component.backend.endpoint.generate",
        "namespace.ns.component.backend.endpoint.generate.kv_events",
        "namespace.ns.component.backend.endpoint.generate.more.kv-events",
        "poa.ns.decisions",
        "",
    ],
)
def test_a_foreign_subject_is_refused(where: str) -> None:
    """Measured: Dynamo's subjects have seven tokens; `kv_events` is not among its topics."""
    assert reason_of(where, b"") == "subject"


def test_a_subject_names_namespace_component_and_topic() -> None:
    """Measured: prefill workers publish under the component `prefill`."""
    assert parse_subject(subject("kv-events", "poa-workers", "prefill")) == Route(
        "poa-workers", "prefill", "kv-events"
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (b"{}", "envelope"),  # JSON: `{` is a small number in msgpack
        (msgspec.msgpack.encode({"publisher_id": 1}), "envelope"),
        (msgspec.msgpack.encode([1, 2]), "envelope"),
        (envelope("kv-events", b"\x90", 1, 0, 0.0), "envelope"),  # not the subject's topic
        (envelope("kv_metrics", b"", 1, 0, 0.0), "payload"),
        (envelope("kv_metrics", b"\x90", 1, 0, 0.0), "payload"),
        (b"\x81\xa1x" + b"\x91" * 100_000, "not_msgpack"),  # nested deeper than any stack
        (envelope("kv_metrics", b"\x81\xa1x" + b"\x91" * 100_000, 1, 0, 0.0), "payload"),
        (b"\x00" * (MAX_MESSAGE_BYTES + 1), "too_large"),
    ],
)
def test_undecodable_bytes_have_a_reason(data: bytes, reason: str) -> None:
    """Issue: undecodable messages are counted by reason."""
    assert reason_of(subject("kv_metrics"), data) == reason


@pytest.mark.parametrize("worker_id", ["", "-1", "+5", "1_0", " 7", "0x1f", "٣", str(2**64), "1" * 5000])
def test_only_a_plain_unsigned_decimal_is_a_worker_id(worker_id: str) -> None:
    """Contract: a worker id is an unsigned 64-bit number; Python's int() takes more than that."""
    topic, body = fp(W1, 1, 0.05)
    body["worker_id"] = worker_id
    assert reason_of(*encoded((topic, body))) == "payload"


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": -1},
        {"worker_id": 1.5},
        {"worker_id": str(W1)},
        {"dp_rank": 2**32},
        {"kv_used_blocks": -1},
        {"active_decode_blocks": 1.0},
        {"kv_used_blocks": "9"},
    ],
)
def test_a_metric_of_the_wrong_type_or_range_is_refused_whole(change: dict[str, Any]) -> None:
    """Rule: bad input is refused, never repaired."""
    topic, body = km(W1, 1, 2, 3)
    assert reason_of(*encoded((topic, body | change))) == "payload"


@pytest.mark.parametrize(
    "data", [{}, {"stored": {"blocks": []}, "removed": {"block_hashes": []}}, "emptied", None, {"grown": 1}]
)
def test_an_unknown_change_of_the_cache_is_refused(data: Any) -> None:
    """Rule: known fields are never guessed."""
    topic, body = cl(W1, 1)
    body[0]["event"]["data"] = data
    assert reason_of(*encoded((topic, body))) == "payload"


def test_every_recorded_message_decodes_to_what_plain_msgpack_gives() -> None:
    """Measured: real traffic of prefill and decode workers and routers."""
    messages = recording("disagg_2p3d")
    decoded = [decode_dynamo(message.subject, message.data) for message in messages]
    assert len(decoded) == 1602
    metrics = [
        (m.publisher_id, m.sequence, m.body.worker_id, m.body.active_decode_blocks, m.body.kv_used_blocks)
        for m in decoded
        if isinstance(m.body, KvMetrics)
    ]
    assert metrics == [
        (
            outer["publisher_id"],
            outer["sequence"],
            b["worker_id"],
            b["active_decode_blocks"],
            b["kv_used_blocks"],
        )
        for outer, b in bodies(messages, "kv_metrics")
    ]
    passes = [
        (
            m.body.worker_id,
            m.body.counter_id,
            m.body.wall_time_s,
            m.body.prefill_tokens,
            m.body.decode_requests,
        )
        for m in decoded
        if isinstance(m.body, ForwardPass)
    ]
    assert passes == [
        (
            int(b["worker_id"]),
            b["counter_id"],
            b["wall_time"],
            b["scheduled_requests"]["sum_prefill_tokens"],
            b["scheduled_requests"]["num_decode_requests"],
        )
        for _, b in bodies(messages, "forward-pass-metrics")
    ]


def refusal(where: str, data: bytes) -> str | None:
    try:
        decode_dynamo(where, data)
    except WireError as error:
        return error.reason
    return None


@settings(derandomize=True, max_examples=400, deadline=None)
@given(topic=st_.sampled_from(TOPICS), data=st_.binary(max_size=300), wrapped=st_.booleans())
def test_arbitrary_bytes_never_raise_anything_else(topic: str, data: bytes, wrapped: bool) -> None:
    """Issue: whatever the bytes, a message is decoded or refused with a reason."""
    reason = refusal(subject(topic), envelope(topic, data, 1, 0, 0.0) if wrapped else data)
    assert reason is None or reason in REASONS


SAMPLES = [
    *(
        encoded(m)
        for m in (km(W1, 1, None, 3), fp(W1, 1, 0.05, 4, 512, 16, 20, 2560), st(W1, 1, -5, [1, 2**63]))
    ),
    *(encoded(m) for m in (rm(W1, 2, [1]), cl(W1, 3))),
]


@settings(derandomize=True, max_examples=600, deadline=None)
@given(
    sample=st_.sampled_from(SAMPLES),
    keep=st_.floats(0, 1),
    flips=st_.lists(st_.tuples(st_.floats(0, 1), st_.integers(0, 7)), max_size=4),
)
def test_damaged_real_messages_never_raise_anything_else(
    sample: tuple[str, bytes], keep: float, flips: list[tuple[float, int]]
) -> None:
    """Issue: truncations and flipped bits of real messages are decoded or refused with a reason."""
    where, whole = sample
    data = bytearray(whole[: round(keep * len(whole))])
    for position, bit in flips:
        if data:
            data[round(position * (len(data) - 1))] ^= 1 << bit
    reason = refusal(where, bytes(data))
    assert reason is None or reason in REASONS


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_truncation_of_a_real_message_is_refused(sample: tuple[str, bytes]) -> None:
    """Rule: a message is decoded whole or refused."""
    where, whole = sample
    for length in range(len(whole)):
        assert reason_of(where, whole[:length]) == "not_msgpack"


MDC = {
    "display_name": "mock",
    "worker_type": "prefill",
    "kv_cache_block_size": 16,
    "unknown": 1,
    "runtime_config": {
        "total_kv_blocks": 512,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "data_parallel_size": 2,
        "data_parallel_start_rank": 4,
        "disaggregated_endpoint": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000},
    },
}


def test_a_model_card_gives_role_capacity_ranks_and_bootstrap_address() -> None:
    """Measured: model card of Dynamo 1.4.2."""
    card = card_from_mdc(W1, MDC)
    assert card == WorkerCard(
        worker_id=W1,
        role=Role.PREFILL,
        kv_block_size=16,
        total_kv_blocks=512,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        data_parallel_size=2,
        data_parallel_start_rank=4,
        bootstrap_host="127.0.0.1",
        bootstrap_port=9000,
        model_name="mock",
    )
    assert list(card.ranks) == [4, 5]


def test_a_plugins_card_leaves_the_capacities_unknown() -> None:
    """Measured: without runtime_config the capacities are null, which is not zero."""
    plugin = recorded_cards("disagg_2p3d", "poa")[0]
    assert (plugin.total_kv_blocks, plugin.max_num_seqs, plugin.max_num_batched_tokens) == (None, None, None)
    assert card_from_mdc(7, {"worker_type": "decode", "kv_cache_block_size": 64}) == WorkerCard(
        worker_id=7, role=Role.DECODE, kv_block_size=64
    )


def test_recorded_cards_give_two_prefill_and_three_decode_workers() -> None:
    """Measured: decode workers share their subject with aggregated ones; only the card tells the role."""
    cards = recorded_cards("disagg_2p3d", "workers")
    assert sorted(card.role.value for card in cards) == ["decode"] * 3 + ["prefill"] * 2
    assert {card.total_kv_blocks for card in cards} == {512}


@pytest.mark.parametrize(
    ("instance_id", "change"),
    [
        (-1, {}),
        (2**64, {}),
        (1, {"worker_type": "encode"}),
        (1, {"worker_type": None}),
        (1, {"kv_cache_block_size": 0}),
        (1, {"runtime_config": {"data_parallel_size": 10**9}}),
        (1, {"runtime_config": {"total_kv_blocks": "512"}}),
        (1, {"runtime_config": {"total_kv_blocks": 2**63}}),
        (1, {"runtime_config": {"disaggregated_endpoint": {"bootstrap_host": "h", "bootstrap_port": 65536}}}),
    ],
)
def test_a_card_that_cannot_be_true_is_refused(instance_id: int, change: dict[str, Any]) -> None:
    """Rule: bad input is refused, never repaired."""
    with pytest.raises(WireError) as caught:
        card_from_mdc(instance_id, MDC | change)
    assert caught.value.reason == "card"
