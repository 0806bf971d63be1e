"""What /metrics says of the policies and of the setting in force.

Owns: names, help and values; how often each policy gave each reason.
Does not own: the other metrics (controller_metrics.py), the record they are made from (telemetry.py).
Invariant: what is unknown is absent; `as` tells the policy whose word counts from the one in shadow.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamo_poa.telemetry import PolicyView, TelemetryRecord
from dynamo_poa.values import Selection

_WISHES = {
    "router_temperature": "τ a policy would set",
    "overlap_weight": "ω a policy would set",
    "prefill_load_scale": "prefill load scale a policy would set; absent where it is Dynamo's own",
}


class PolicyMetrics:
    """Counts reasons; all else is made at the moment of the scrape."""

    def __init__(self) -> None:
        self._reasons: Counter[tuple[str, str, str]] = Counter()

    def take(self, record: TelemetryRecord) -> None:
        """Count what each policy gave as its reason."""
        for role, policy in _policies(record):
            self._reasons[role, policy.name, policy.reason] += 1

    def collect(self, record: TelemetryRecord) -> Iterator[Metric]:
        """Yield all families."""
        if record.prefill_load_scale is not None:
            yield GaugeMetricFamily(
                "poa_prefill_load_scale", "prefill load scale in force", value=record.prefill_load_scale
            )
        selection = GaugeMetricFamily("poa_selection", "1 for who picks the worker", labels=["selection"])
        for who in Selection:
            selection.add_metric([str(who)], float(who is record.selection))
        yield selection
        yield from _wishes(record)
        answers = CounterMetricFamily(
            "poa_policy_answers", "ticks by a policy's reason", labels=["as", "policy", "reason"]
        )
        for labels, count in self._reasons.items():
            answers.add_metric(labels, count)
        yield answers
        errors = CounterMetricFamily(
            "poa_policy_errors", "times a policy failed and was disabled", labels=["as", "policy"]
        )
        for role, policy in _policies(record):
            errors.add_metric([role, policy.name], policy.errors)
        yield errors


def _policies(record: TelemetryRecord) -> Iterator[tuple[str, PolicyView]]:
    for role, policy in (("active", record.policy), ("shadow", record.shadow)):
        if policy is not None:
            yield role, policy


def _wishes(record: TelemetryRecord) -> Iterator[Metric]:
    names = ["as", "policy"]
    wishes = {
        key: GaugeMetricFamily(f"poa_policy_{key}", text, labels=names) for key, text in _WISHES.items()
    }
    marginal = GaugeMetricFamily(
        "poa_policy_marginal", "1 for a policy that would let the plugin select", labels=names
    )
    gain = GaugeMetricFamily(
        "poa_policy_predicted_gain_frac", "predicted cost saved over what is in force", labels=names
    )
    disabled = GaugeMetricFamily("poa_policy_disabled", "1 while it is not asked: it failed", labels=names)
    for role, policy in _policies(record):
        labels = [role, policy.name]
        for key, family in wishes.items():
            value = getattr(policy.setting, key)
            if value is not None:
                family.add_metric(labels, value)
        marginal.add_metric(labels, float(policy.setting.selection is Selection.MARGINAL))
        if policy.predicted_gain_frac is not None:
            gain.add_metric(labels, policy.predicted_gain_frac)
        disabled.add_metric(labels, float(policy.disabled_left_s is not None))
    yield from wishes.values()
    yield marginal
    yield gain
    yield disabled
