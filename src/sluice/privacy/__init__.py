"""Arithmetic of privacy: events, accountants, accounts and plans. No I/O, no torch."""
