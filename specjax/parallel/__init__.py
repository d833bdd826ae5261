"""Many devices: meshes, what passes between devices, and processes that share a mesh."""
