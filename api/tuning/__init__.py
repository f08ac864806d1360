"""Fine-tuning jobs: what callers ask for, and the trainer processes that do it."""
