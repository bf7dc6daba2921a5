"""What is done with a recording afterwards: replay, where the time went, traces."""
