"""Kernels of tree decoding: arrays in, arrays out. Imports jax only."""


def use(name: str) -> None:
    """Names the implementation of tree attention for all calls of this process that name none.

    "xla" also leaves products on a CPU to XLA (`pallas_kernels.cpu`).

    Programs that were compiled before are forgotten where this changes the choice, so that they do
    not go on with the old one.

    Args:
      name: "auto", the fastest that is measured for each shape, which is the default; "xla" or the
        name of a kernel ("tpu", "hopper", "triton").

    Raises:
      pallas_kernels.dispatch.ImplementationError: there is no such implementation, or it cannot
        run on this platform. A call with operands that it does not take raises it too.
    """
    from pallas_kernels.tree_attention import autotune

    autotune.use(name)


def forget() -> None:
    """Forgets what was measured on this kind of device, so that it is measured anew.

    That is what the cache folder keeps and what this process chose; compiled programs are
    forgotten too. What is shipped stays. On a CPU, where nothing is measured, it does nothing.
    """
    from pallas_kernels.tree_attention import autotune

    autotune.forget()
