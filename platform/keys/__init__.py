"""API keys: who is calling, and what may they do."""
