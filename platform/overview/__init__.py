"""The console's figures: time series and memory maps reported by the servers."""
