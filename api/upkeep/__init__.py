"""Background upkeep: garbage collection, expiry and the disk reserve."""
