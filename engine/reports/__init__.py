"""What the engine tells of itself: its setup, adapters, memory and requests."""
