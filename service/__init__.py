"""The HTTP service: requests in, rows out. Holds no private bytes and no torch."""
