"""API keys: authentication and permissions."""
