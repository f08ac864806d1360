"""A tenant's users and their roles."""
