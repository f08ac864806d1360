"""Sends the events of tenants' webhooks, through a confined process."""
