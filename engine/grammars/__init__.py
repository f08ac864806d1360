"""Grammars: outputs that follow a JSON schema, a regular expression or a context-free grammar."""
