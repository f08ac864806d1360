"""Who changed what: chained by keyed hashes, written with the change."""
