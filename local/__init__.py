"""Sluice on one machine: real servers from wheels and our own processes, as children under one directory."""
