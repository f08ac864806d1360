"""Prefixes on their way between engines, and how their pages travel."""
