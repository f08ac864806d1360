"""The engine's process: its loop, its supervisor, and the client in the API server."""
