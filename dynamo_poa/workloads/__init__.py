"""Workloads: what is asked and when, seeded and streaming, for the simulator and for live graphs alike."""
