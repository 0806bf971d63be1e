"""A page of /metrics as a test reads it."""

import math

from prometheus_client.parser import text_string_to_metric_families


def samples_of(page: str) -> dict[str, float]:
    """Return all samples, named as in the exposition: `name{label="value"}`, labels in order of their names.

    Every sample must be finite and no series there twice (O1).
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            name = sample.name + (f"{{{labels}}}" if labels else "")
            assert name not in samples, name
            assert math.isfinite(sample.value), sample
            samples[name] = sample.value
    return samples
