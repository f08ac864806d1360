"""Builders shared by the tests: small models and adapters, made through the real libraries."""
