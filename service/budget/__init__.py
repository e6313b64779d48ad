"""Budgets: what each account was granted, has reserved and has spent, by whom and why."""
