"""The device's memory: how it is divided, and what a step moves through it."""
