"""What runs in the background: cleaning, expiry and the disk reserve."""
