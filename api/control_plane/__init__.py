"""The server's way to the control plane: sessions of the database, leases, jobs and caches."""
