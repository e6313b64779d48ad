"""People and their keys, for admins."""
