"""A simulated fleet with roles: prefixes are handed over between real schedulers and caches."""
