"""Evaluations that the server runs."""
