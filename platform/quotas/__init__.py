"""What a tenant may use, and what it has reserved."""
