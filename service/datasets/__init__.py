"""Datasets: declared, uploaded, sealed, checked."""
