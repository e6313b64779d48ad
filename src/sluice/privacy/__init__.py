"""Arithmetic of privacy: events, accountants and accounts. No I/O, no torch."""
