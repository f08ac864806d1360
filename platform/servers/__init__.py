"""The servers that share this database."""
