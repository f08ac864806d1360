"""The scheduler: which tokens of which requests each step computes."""
