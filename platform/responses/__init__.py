"""Responses that tenants asked to be stored."""
