"""The request log: figures and codes of each request, never text."""
