"""The base model: its layers with adapters attached, its inputs, and the check at load."""
