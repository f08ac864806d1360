"""The engine's reports: setup, adapters, memory and requests."""
