"""HTTP: connections, request context, authentication and streams."""
