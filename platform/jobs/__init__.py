"""Upkeep jobs that one server at a time runs."""
