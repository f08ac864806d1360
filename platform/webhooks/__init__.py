"""Webhooks: endpoints of tenants, and the events that are delivered to them."""
