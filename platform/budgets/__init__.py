"""Budgets of money: of a tenant, its users and its keys."""
