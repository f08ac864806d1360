"""What a base and a load would need, before either is there."""
