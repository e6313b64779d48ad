"""Quotes and jobs: what a training would cost, and the training itself."""
