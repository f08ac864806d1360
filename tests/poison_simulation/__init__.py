"""A simulated fleet under poisonous adapters: the real servers and agents, simulated engines."""
