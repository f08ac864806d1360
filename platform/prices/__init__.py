"""Prices of tokens, in money."""
