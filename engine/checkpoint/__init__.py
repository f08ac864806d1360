"""The base's files: what they declare, which tensors they hold, and the base's identity."""
