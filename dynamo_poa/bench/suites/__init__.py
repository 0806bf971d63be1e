"""Suites: policies side by side on the simulator and on live graphs, and what came of it."""
