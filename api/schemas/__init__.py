"""The bodies that callers send and the answers they get."""
