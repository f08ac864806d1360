"""What servers measured of their own work: figures over time, and where things lay."""
