"""Tenants' limits, usage and reservations."""
