"""Base models whose files hold quantized weights."""
