"""Metrics, traces, logs, and the figures that the console shows."""
