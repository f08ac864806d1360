"""A step's execution: its inputs, the forward pass, masks and sampling."""
