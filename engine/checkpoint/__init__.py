"""The base's files: configuration, tensors and the base's identity."""
