"""Unpacks the quantized weights of checkpoints."""
