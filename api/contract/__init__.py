"""What the API promises: error codes, the shapes of answers, and how routes declare them."""
