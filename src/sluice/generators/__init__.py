"""What may leave the private side: samplers that know their weights and no record."""
