"""Upkeep that one server at a time does."""
