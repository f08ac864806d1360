"""The ledger: usage by request, tenant and adapter version."""
