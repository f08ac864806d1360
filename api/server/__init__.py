"""One server process: its services, readiness and data folder."""
