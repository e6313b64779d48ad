"""Classes for the buckets, each with only the operations that its process needs."""
