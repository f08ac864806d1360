"""Batches: the files of tenants, and the lines in them that are answered in the background."""
