"""The workers: rows in, files out. Train on the private side, publish on the public side."""
