"""Sign-in through the operator's identity provider (OpenID Connect)."""
