"""The engine process, its supervisor, and the client in the API server."""
