"""The engine in the caller's own process, without a server and without a database."""
