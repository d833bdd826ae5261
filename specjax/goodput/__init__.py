"""How much to speculate: goodput from measured costs and observed acceptance, without jax."""
