"""Shadow traffic: copies of live requests, answered by another version and compared."""
