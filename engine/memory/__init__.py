"""The device's memory: its division, and the bytes that a step moves."""
