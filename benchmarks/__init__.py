"""Measuring scripts, which run from a checkout; README.md names each."""
