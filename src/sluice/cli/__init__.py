"""The sluice command, the HTTP client and the local stack."""
