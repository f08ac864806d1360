"""The ledger: what was used, by whom, with which adapter."""
