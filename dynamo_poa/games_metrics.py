"""What /metrics says of the caching game, the split of workers and where the cost is from.

Owns: names, help and values.
Does not own: the other metrics (controller_metrics.py), the estimates (coupling.py).
Invariant: what is unknown is absent, never 0, 1 or NaN.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from dynamo_poa.telemetry import TelemetryRecord

_CACHING = {
    "poa_caching_hat": ("poa_hat", "observed over best cost of where prefixes are cached"),
    "poa_caching_observed_frac": ("observed_s", "GPU seconds a second spent on fetching and recomputing"),
    "poa_caching_optimal_frac": ("optimal_s", "the same under the best placement"),
    "poa_caching_groups": ("groups", "prefix groups priced"),
    "poa_caching_duplication": ("duplication", "copies of a distinct resident block, mean"),
    "poa_caching_copies_frac": ("copies_frac", "share of capacity held by copies within a node"),
    "poa_caching_shared_hits_frac": ("shared_hits_frac", "share of prefix hits served by another's copy"),
    "poa_caching_reload_frac": ("reload_frac", "share of evicted blocks stored again soon after"),
}
_ALLOCATION = {
    "poa_allocation_hat": ("poa_hat", "cost of the split of workers over that of the best one"),
    "poa_allocation_one_more_prefill_frac": ("one_more_prefill", "goodput one more prefill worker would add"),
    "poa_allocation_one_more_decode_frac": ("one_more_decode", "goodput one more decode worker would add"),
}
_ATTAINED = {
    "goodput_rps": "requests a second within both objectives, predicted",
    "ttft_frac": "share of requests within the TTFT objective, predicted",
    "itl_frac": "share of requests within the ITL objective, predicted",
}


def games_families(record: TelemetryRecord) -> Iterator[Metric]:
    """Yield all families."""
    for source, gauges in ((record.caching, _CACHING), (record.allocation, _ALLOCATION)):
        for name, (field, text) in gauges.items():
            value = getattr(source, field)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=float(value))
    if record.caching.workers:
        text = "1 while a cache's contents are known approximately"
        yield GaugeMetricFamily("poa_caching_uncertain", text, value=float(record.caching.uncertain))
    yield from _splits(record)
    dominant = GaugeMetricFamily(
        "poa_dominant", "1 for where more than half of the cost beyond the unloaded is from", labels=["cause"]
    )
    for cause in ("routing", "caching", "capacity"):
        dominant.add_metric([cause], float(record.coupling.dominant == cause))
    yield dominant
    yield GaugeMetricFamily(
        "poa_advice", "1 while another split is advised", value=float(record.poa_advice is not None)
    )


def _splits(record: TelemetryRecord) -> Iterator[Metric]:
    found = record.allocation
    splits = {"now": found.now, "best": found.best, "equilibrium": found.equilibrium}
    workers = GaugeMetricFamily("poa_allocation_workers", "workers of a split", labels=["split", "role"])
    attained = {
        field: GaugeMetricFamily(f"poa_allocation_{field}", text, labels=["split"])
        for field, text in _ATTAINED.items()
    }
    for name, split in splits.items():
        if split is None:
            continue
        workers.add_metric([name, "prefill"], split.split.prefill)
        workers.add_metric([name, "decode"], split.split.decode)
        for field, family in attained.items():
            family.add_metric([name], getattr(split, field))
    yield workers
    yield from attained.values()
