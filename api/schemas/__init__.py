"""The schemas of request bodies and responses."""
