"""Base models in GGUF files."""
