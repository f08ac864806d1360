"""Samples of requests that tenants chose to keep."""
