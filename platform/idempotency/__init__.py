"""Stored responses for repeated requests (`Idempotency-Key`)."""
