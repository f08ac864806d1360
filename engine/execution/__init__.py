"""Executes a step: inputs, forward pass, masks and sampling."""
