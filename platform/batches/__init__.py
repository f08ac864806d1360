"""Batches: requests in a file, answered in the background."""
