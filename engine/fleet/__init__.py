"""Many machines: the API servers' connections to the engines of others."""
