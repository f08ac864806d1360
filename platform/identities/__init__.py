"""Identities at the operator's identity provider, and the users and operators who have them."""
