"""Budgets: what every account was granted, holds and has spent, who moved it and why."""
