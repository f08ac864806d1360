"""Answers kept for callers who ask the same again."""
