"""The catalog: adapters by name, their immutable versions, aliases and uploads."""
