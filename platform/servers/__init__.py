"""The installations that serve from this database."""
