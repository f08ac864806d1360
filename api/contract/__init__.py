"""The API contract: error codes, response schemas, and their declaration at routes."""
