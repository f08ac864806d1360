"""The base model: layers with adapters, inputs, and the checks at load."""
