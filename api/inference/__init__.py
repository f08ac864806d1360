"""A generation from its request to its usage record, without HTTP."""
