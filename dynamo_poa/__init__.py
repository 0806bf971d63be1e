"""Adaptive routing control plane for NVIDIA Dynamo."""

__version__ = "0.1.0"
