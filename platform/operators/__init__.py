"""Who runs the platform: operators and their keys, which belong to no tenant."""
