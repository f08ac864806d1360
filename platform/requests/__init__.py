"""What became of each request: figures and codes, never text."""
