"""Who uses the platform: tenants."""
