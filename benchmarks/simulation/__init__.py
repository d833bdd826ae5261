"""The choice of settings over costs and acceptance that are simulated, without a device."""
