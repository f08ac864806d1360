"""How the base is divided among the ranks of a tensor-parallel group."""
