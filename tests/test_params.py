"""Records are refused whole by reason; the holder keeps the last good one, then the static one."""

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_poa.errors import ParamsError
from dynamo_poa.params import (
    MAX_RECORD_BYTES,
    ParamsHolder,
    decode_heartbeat,
    decode_params,
    encode_params,
)
from dynamo_poa.values import Mode, ParamsKind, Regime, RouterParams, Selection, Setting
from dynamo_poa.wire import Heartbeat

STATIC = RouterParams(revision=0, router_temperature=0.0, overlap_weight=1.0)


def record(revision: int, router_temperature: float = 0.5, lease_s: float = 30.0) -> RouterParams:
    return RouterParams(
        revision=revision,
        router_temperature=router_temperature,
        overlap_weight=0.8,
        kind=ParamsKind.POLICY,
        reason="ttft",
        regime=Regime.SATURATED,
        issued_at_s=1_800_000_000.5,
        lease_s=lease_s,
    )


def heartbeat(params: RouterParams) -> bytes:
    return msgspec.msgpack.encode(
        Heartbeat(controller_id="c", sent_at_s=1.0, mode=Mode.ACTIVE, params=params)
    )


def holder() -> ParamsHolder:
    return ParamsHolder(STATIC, clock_s=lambda: 1000.0)


def written(**changes: object) -> bytes:
    """A record as an operator writes it, with changes; json.dumps writes NaN and Infinity as such."""
    return json.dumps({"router_temperature": 0.7, "overlap_weight": 0.3} | changes).encode()


def test_a_record_survives_storing() -> None:
    """Contract: the store keeps every field."""
    assert decode_params(encode_params(record(7))) == record(7)


def test_a_record_says_who_selects_and_the_prefill_load_scale() -> None:
    """An older record, or one by hand, leaves both to Dynamo; what is said is kept."""
    older = decode_params(written())
    assert older.setting == Setting(0.7, 0.3, None, Selection.KV)
    params = decode_params(written(prefill_load_scale=4, selection="marginal"))
    assert params.setting == Setting(0.7, 0.3, 4.0, Selection.MARGINAL)
    assert decode_params(encode_params(params)) == params
    for other in (older, decode_params(written(prefill_load_scale=4))):
        assert not params.same_values(other)


def test_a_record_by_hand_needs_its_two_values_only() -> None:
    """Operators write the entry by hand; what they leave out has a default, and the kind says who it was."""
    assert decode_params(
        b'{"router_temperature": 0.7, "overlap_weight": 1, "note": "unknown"}'
    ) == RouterParams(revision=0, router_temperature=0.7, overlap_weight=1.0, kind=ParamsKind.EXTERNAL)


REFUSALS = [
    (b"", "empty", "record"),
    (b"x" * (2 * 2**20), "too_large", "record"),
    (written(reason="x" * MAX_RECORD_BYTES), "too_large", "record"),
    (written()[:-1], "not_json", "record"),
    (b"\xff\xfe\x00", "not_json", "record"),
    (b"[" * 10_000, "not_json", "record"),
    (b"null", "type", "record"),
    (b"[0.7, 0.3]", "type", "record"),
    (b'{"router_temperature": 0.7}', "missing", "overlap_weight"),
    (b'{"overlap_weight": 0.7}', "missing", "router_temperature"),
    (written(router_temperature=float("nan")), "not_finite", "router_temperature"),
    (written(router_temperature=float("inf")), "not_finite", "router_temperature"),
    (written(overlap_weight=float("nan")), "not_finite", "overlap_weight"),
    (b'{"router_temperature": 1e999, "overlap_weight": 1}', "not_finite", "router_temperature"),
    (written(router_temperature=1e308), "out_of_range", "router_temperature"),
    (written(router_temperature=10**400), "out_of_range", "router_temperature"),
    (written(router_temperature=-0.1), "out_of_range", "router_temperature"),
    (written(overlap_weight=-0.5), "out_of_range", "overlap_weight"),
    (written(overlap_weight=2.5), "out_of_range", "overlap_weight"),
    (written(router_temperature="0.7"), "type", "router_temperature"),
    (written(router_temperature=True), "type", "router_temperature"),
    (written(overlap_weight=None), "type", "overlap_weight"),
    (written(revision=-1), "out_of_range", "revision"),
    (written(revision=2**53), "out_of_range", "revision"),
    (written(revision=1.5), "type", "revision"),
    (written(lease_s=-1), "out_of_range", "lease_s"),
    (written(baseline_s="x"), "type", "baseline_s"),
    (written(baseline_s=float("nan")), "not_finite", "baseline_s"),
    (written(baseline_s=0), "out_of_range", "baseline_s"),
    (written(baseline_s=-3), "out_of_range", "baseline_s"),
    (written(kind="boss"), "out_of_range", "kind"),
    (written(kind=1), "type", "kind"),
    (written(kind=["policy"]), "type", "kind"),
    (written(regime="hot"), "out_of_range", "regime"),
    (written(selection="best"), "out_of_range", "selection"),
    (written(selection=None), "type", "selection"),
    (written(prefill_load_scale="4"), "type", "prefill_load_scale"),
    (written(prefill_load_scale=float("nan")), "not_finite", "prefill_load_scale"),
    (written(prefill_load_scale=-0.5), "out_of_range", "prefill_load_scale"),
    (written(prefill_load_scale=16.5), "out_of_range", "prefill_load_scale"),
    (written(reason=1), "type", "reason"),
]


@pytest.mark.parametrize(("data", "reason", "key"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_bad_record_is_refused_whole_by_reason(data: bytes, reason: str, key: str) -> None:
    """Case I3: each bad value is refused, counted by reason, and the last good one stays."""
    params = holder()
    assert params.offer(record(3), "heartbeat")
    assert not params.offer_bytes(data, "store")
    assert params.refused == Counter({reason: 1})
    assert params.last_refusal is not None
    assert (params.last_refusal.reason, params.last_refusal.key) == (reason, key)
    assert params.current == record(3)


def test_a_refusal_names_key_value_and_bound() -> None:
    """Bad input: one message that says what to correct."""
    with pytest.raises(ParamsError, match=r"^overlap_weight = -0\.5: must be a finite number in \[0, 2\]$"):
        decode_params(written(overlap_weight=-0.5))


@settings(derandomize=True, max_examples=300)
@given(
    st.binary(max_size=200)
    | st.dictionaries(
        st.sampled_from(RouterParams.__struct_fields__) | st.text(max_size=5),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    ).map(lambda raw: json.dumps(raw).encode())
)
def test_any_bytes_give_a_valid_record_or_a_refusal(data: bytes) -> None:
    """Invariant: a RouterParams that exists is valid, and can be stored and sent again."""
    for decode in (decode_params, lambda data: decode_heartbeat(data).params):
        try:
            params = decode(data)
        except ParamsError:
            continue
        assert 0 <= params.router_temperature <= 100
        assert 0 <= params.overlap_weight <= 2
        assert decode_params(encode_params(params)) == params
        assert decode_heartbeat(heartbeat(params)).params == params


def test_a_heartbeat_is_refused_by_the_same_rules() -> None:
    """Contract: validated at both ends; a NaN in msgpack is an ordinary float."""
    good = msgspec.msgpack.decode(heartbeat(record(3)))
    assert decode_heartbeat(msgspec.msgpack.encode(good | {"later": 1})).params == record(3)
    for change, reason in (
        ({"router_temperature": float("nan")}, "not_finite"),
        ({"overlap_weight": -0.5}, "out_of_range"),
        ({"overlap_weight": "0.7"}, "type"),
        ({"revision": 2**60}, "out_of_range"),
    ):
        params = holder()
        bad = msgspec.msgpack.encode(good | {"params": good["params"] | change})
        assert not params.offer_bytes(bad, "heartbeat")
        assert params.refused == Counter({reason: 1})
        assert params.current == STATIC
    half = {key: value for key, value in good["params"].items() if key != "overlap_weight"}
    for data, reason in (
        (b"", "empty"),
        (bytes(MAX_RECORD_BYTES + 1), "too_large"),
        (heartbeat(record(3))[:-1], "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (msgspec.msgpack.encode(good | {"params": half}), "type"),
        (encode_params(record(3)), "type"),
    ):
        params = holder()
        assert not params.offer_bytes(data, "heartbeat")
        assert params.refused == Counter({reason: 1})


def test_a_leased_record_gives_way_to_a_higher_revision_only() -> None:
    """Contract: revisions are monotonic; late and reordered heartbeats change nothing."""
    params = holder()
    assert (params.current, params.source) == (STATIC, "static")
    assert params.offer(record(5), "store")
    assert params.source == "store"
    assert params.offer(record(7, 0.9), "heartbeat")
    assert not params.offer(record(6), "heartbeat")
    assert not params.offer(record(7, 0.8), "heartbeat")
    assert (params.current, params.source) == (record(7, 0.9), "heartbeat")
    assert params.refused == Counter({"stale_revision": 1, "conflict": 1})


def test_a_store_read_that_a_heartbeat_overtook_is_not_a_refusal() -> None:
    """Case I1: after a reconnect the store's read and the next heartbeat race; neither order is an error."""
    params = holder()
    params.offer(record(7), "heartbeat")
    assert not params.offer(record(6), "store")
    assert (params.current, params.refused) == (record(7), Counter())


def test_a_lease_runs_from_the_last_receipt_and_ends_once() -> None:
    """Safe state: no heartbeat for `lease_s` means the static parameters, and it is said once."""
    params = holder()
    assert not params.expire(5000.0)
    assert params.offer(record(5, lease_s=3.0), "heartbeat", at_s=1000.0)
    assert params.offer(record(5, lease_s=3.0), "heartbeat", at_s=1002.0)
    assert not params.expire(1004.9)
    assert params.current == record(5, lease_s=3.0)
    assert params.expire(1005.0)
    assert (params.current, params.source) == (STATIC, "static")
    assert not params.expire(1006.0)


def test_a_selection_by_the_plugin_ends_with_the_lease_like_all_else() -> None:
    """A controller that has gone leaves no router with its plugin's selection: Dynamo's own is the static."""
    params = holder()
    marginal = msgspec.structs.replace(record(5, lease_s=3.0), selection=Selection.MARGINAL)
    assert params.offer_bytes(heartbeat(marginal), "heartbeat", at_s=1000.0)
    assert not params.expire(1002.9)
    assert params.current.selection is Selection.MARGINAL
    assert params.expire(1003.0)
    assert params.current.selection is Selection.KV


def test_a_refused_record_does_not_renew_the_lease() -> None:
    """Two controllers must not keep each other's records alive."""
    params = holder()
    params.offer(record(5, lease_s=3.0), "heartbeat", at_s=1000.0)
    assert not params.offer(record(4, lease_s=3.0), "heartbeat", at_s=1002.0)
    assert params.expire(1003.0)


def test_after_the_lease_a_lower_revision_is_taken() -> None:
    """A controller that lost its store counts from the beginning."""
    params = holder()
    params.offer(record(57, lease_s=3.0), "heartbeat", at_s=1000.0)
    assert not params.offer(record(1), "heartbeat", at_s=1001.0)
    assert params.expire(1003.0)
    assert params.offer(record(1), "heartbeat", at_s=1004.0)
    assert params.current == record(1)


def test_offers_and_expiry_read_the_injected_clock() -> None:
    """Time is a constructor argument."""
    now_s = [1000.0]
    params = ParamsHolder(STATIC, clock_s=lambda: now_s[0])
    assert params.offer_bytes(encode_params(record(5, lease_s=3.0)), "store")
    now_s[0] = 1002.9
    assert not params.expire()
    now_s[0] = 1003.0
    assert params.expire()
