"""Training of adapters on the served base, in a confined process of its own."""
