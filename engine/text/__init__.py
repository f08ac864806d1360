"""Tokenization and detokenization."""
