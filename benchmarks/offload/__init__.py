"""Targets of which layers are on disk or in the host's memory, and peers over the same files."""
