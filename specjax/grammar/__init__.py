"""Structured output: what texts must match, compiled by llguidance, followed token by token."""
