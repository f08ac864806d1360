"""Signing in at the console: passwords, invitations, sessions, and who has guessed too often."""
