"""One server process: its services, its readiness and its data directory."""
