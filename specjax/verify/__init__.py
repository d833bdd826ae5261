"""Verification rules: which nodes of a tree are accepted, and the token after them."""
