"""Sign-in to the console: passwords, invitations, sessions, and failed attempts."""
