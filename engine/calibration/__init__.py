"""Makes quantized checkpoints with the help of a calibration text."""
