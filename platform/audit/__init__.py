"""The audit log: keyed hash chains of changes, written with each change."""
