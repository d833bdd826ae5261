"""Continuous batching: requests come and go in the rows of one compiled step."""
