"""`specjax shard`: a model written by shards, for any mesh."""

from pathlib import Path

from specjax.base.progress import working
from specjax.checkpoints.files import find
from specjax.checkpoints.huggingface import check_free, described, read_config, save_sharded
from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.cli.options import Shard
from specjax.cli.values import dtype_of
from specjax.models.memory import readable
from specjax.parallel.processes import devices_for


def shard(options: Shard) -> int:
    """Runs `specjax shard`; gives the exit code.

    The configuration is kept word for word, but for end tokens that stood in a file of their own.

    Raises:
      CheckpointError: the model is missing, damaged or not supported, or one is written already.
      ValueError: an option is wrong, or the mesh does not divide the model.
    """
    kind, out = dtype_of(options.dtype), Path(options.out)
    mesh = devices_for(options.mesh, options.distributed)
    files = find(options.model, options.lora)
    check_free(out)
    config = read_config(files.path)[0]
    tokenizer = tokenizer_of(files.path, config.vocab_size)
    with working("loading the model"):
        model = load_model(files, dtype=kind, mesh=mesh)
    with working(f"writing {out}"):
        save_sharded(model, out, tokenizer=tokenizer, config=described(files.path))
    held = model.embedding.dtype
    size = readable(config.num_parameters * held.itemsize)
    print(f"wrote {out}: {config.num_parameters:,} parameters in {held}, {size}.")
    return 0
