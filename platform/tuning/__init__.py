"""Fine-tuning jobs: adapters that are trained from a tenant's files."""
