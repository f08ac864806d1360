"""The server's access to the control plane: database sessions, leases, jobs and caches."""
