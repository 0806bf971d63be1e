"""Load, demo and measurements: what shows that the rest works, and what it costs."""
