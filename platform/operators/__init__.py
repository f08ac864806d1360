"""Operators and their keys, which belong to no tenant."""
