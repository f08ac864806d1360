"""HTTP: the connection, the request's context, who calls, and streams."""
