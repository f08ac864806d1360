"""A fleet's replicas and this server's connections to them."""
