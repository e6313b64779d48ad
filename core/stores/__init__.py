"""The buckets, each behind a class that has only the verbs its process needs."""
