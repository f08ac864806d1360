"""The replicas of a fleet: the agents that API servers connect to."""
