"""People, their invitations and API keys."""
