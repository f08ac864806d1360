"""The processes of a tensor-parallel group: rank 0 commands, the followers do the same work."""
