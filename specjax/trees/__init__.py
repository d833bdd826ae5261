"""Token trees of static size: their topology, their shape, and how they are made."""
