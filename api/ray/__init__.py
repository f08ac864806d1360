"""Ray places and restarts the agents of replicas. No request and no token passes through it."""
