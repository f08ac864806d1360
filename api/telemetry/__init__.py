"""Metrics, traces, logs, and the console's figures."""
