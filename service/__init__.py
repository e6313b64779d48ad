"""The HTTP service. It never reads private records and does not depend on torch."""
