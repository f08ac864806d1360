"""Speculative decoding: the normal step verifies draft tokens, without changing the output."""
