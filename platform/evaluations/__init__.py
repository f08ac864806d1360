"""Golden sets of adapters, and evaluations of versions on them."""
