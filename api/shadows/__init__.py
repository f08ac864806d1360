"""Copies of live requests, answered by another version and compared: shadows, judged canaries."""
