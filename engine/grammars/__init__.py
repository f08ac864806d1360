"""Grammars: outputs constrained to a JSON schema, regular expression or context-free grammar."""
