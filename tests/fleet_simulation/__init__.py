"""A simulated fleet: the router of `engine/fleet` and other policies on the same requests."""
