"""Response formats: a generation's deltas as complete responses and as stream chunks."""
