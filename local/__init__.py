"""Sluice on one machine: servers, service and workers as child processes with one data directory."""
