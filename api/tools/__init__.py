"""Functions that a model may call: how it is told of them, and how its calls are read."""
