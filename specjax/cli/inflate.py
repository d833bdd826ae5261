"""`specjax inflate`: a model grown to a size that nobody trained, written layer by layer."""

from pathlib import Path

from specjax.base.progress import counted
from specjax.checkpoints.files import find
from specjax.checkpoints.inflating import inflate_folder
from specjax.cli.options import Inflate
from specjax.cli.values import check_seed, count_of
from specjax.models.memory import readable


def inflate(options: Inflate) -> int:
    """Runs `specjax inflate`; gives the exit code.

    Raises:
      CheckpointError: the model is missing or damaged, or one is written there already.
      ValueError: an option is wrong, or the model cannot be grown so.
    """
    check_seed(options.seed)
    parameters, out = count_of(options.parameters), Path(options.out)
    experts = None if options.experts is None else (options.experts, options.experts_per_token)
    with counted("inflate") as progress:
        done = inflate_folder(find(options.model), out, parameters, options.seed, progress, experts)
    print(
        f"wrote {out}: {done.parameters:,} parameters in {done.layers} layers, bfloat16, "
        f"{readable(done.size)}."
    )
    return 0
