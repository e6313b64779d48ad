"""Releases: drafted by one person, approved by another, published, found, downloaded, withdrawn."""
