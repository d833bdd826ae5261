"""Quantized weights against the libraries whose formats they are in.

    python -m tests.quantized_libraries [auto_gptq/nn_modules/qlinear/qlinear_cuda.py \\
        awq/utils/packing_utils.py]

Needs torch, transformers, compressed-tensors and bitsandbytes beside what the tests need, all on a
CPU; of AutoGPTQ and AutoAWQ, which do not install any more, the files with the arithmetic alone.
Each library quantizes a matrix, or reads a model that `specjax quantize` or the writers of
`tests.quantized_files` wrote; what specjax reads must be what the library makes of it.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from specjax.checkpoints.files import find
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.quantizing import quantize_folder
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model, forward
from tests.conftest import tiny_model
from tests.quantized_files import rewrite

_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_layers": 2}
_TOKENS = np.arange(3, 35).reshape(2, 16)


def ours(model: Model) -> np.ndarray:
    """The logits of some tokens."""
    places = jnp.broadcast_to(jnp.arange(_TOKENS.shape[1]), _TOKENS.shape)
    return np.asarray(forward(model, jnp.asarray(_TOKENS), places, None, None)[0])


def theirs(folder: Path, **more: Any) -> np.ndarray:
    """The same by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    with torch.no_grad():
        return model(torch.tensor(_TOKENS)).logits.float().numpy()


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, over the largest number."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def written_by_us(folder: Path) -> Iterator[tuple[str, float]]:
    """Models that `specjax quantize` writes, read by transformers with compressed-tensors."""
    save_model(tiny_model(tie_embeddings=False, **_SHAPE), folder / "whole", dtype="float32")
    for bits, group in ((4, None), (4, 64), (4, 32), (8, None), (8, 64)):  # 4 by default: some in 8
        made = folder / f"made{bits}{group}"
        quantize_folder(find(folder / "whole"), made, bits=bits, group=group)
        name = f"specjax quantize, {bits} bits, groups of {group}, read by transformers"
        yield name, difference(ours(load_model(made)), theirs(made))


def tables_by_us(folder: Path) -> Iterator[tuple[str, float]]:
    """The same with tables in 8 bits, whose scales are float32: transformers unpacks into theirs.

    transformers 5.24 keeps no table packed ('Embedding' object has no attribute 'weight').
    """
    for tied in (True, False):
        whole, made = folder / f"whole-{tied}", folder / f"tables-{tied}"
        save_model(tiny_model(tie_embeddings=tied, **_SHAPE), whole, dtype="float32")
        quantize_folder(find(whole), made, bits=8, table=8)
        for file in made.glob("*.safetensors"):
            held = {name: each.astype(np.float32) if name.endswith("scale") else each
                    for name, each in load_file(file).items()}  # fmt: skip
            save_file(held, made / "model.safetensors", metadata={"format": "pt"})
            file.unlink()
        (made / "model.safetensors.index.json").unlink()
        about = json.loads((made / "config.json").read_text())["quantization_config"]
        del about["quant_method"]
        config = transformers.CompressedTensorsConfig(**about, dequantize=True)
        found = difference(ours(load_model(made)), theirs(made, quantization_config=config))
        yield f"specjax quantize --table 8, {'tied' if tied else 'untied'}, by transformers", found


def _compressed(bits: int, symmetric: bool, shuffled: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group",
        "group_size": 16, "dynamic": False, "actorder": "group" if shuffled else None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def _whole(kind: str, strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy,
               "dynamic": False}  # fmt: skip
    return _compressed(8, True, False) | {
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


_READ = {
    "words of 4 bits": _compressed(4, True, False),
    "words of 8 bits": _compressed(8, True, False),
    "fp8": _whole("float", "tensor"),
}


def read_by_both(folder: Path) -> Iterator[tuple[str, float]]:
    """Random codes in compressed-tensors' layouts, read by transformers and by us."""
    for layout, about in _READ.items():
        made = folder / layout.replace(" ", "-")
        save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")
        rewrite(made, layout)
        file = made / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
        yield f"{layout} (compressed-tensors)", difference(ours(load_model(made)), theirs(made))


def by_matrix(folder: Path) -> Iterator[tuple[str, float]]:
    """Matrices of compressed-tensors' layouts, multiplied out by its own compressors.

    transformers 5.24 reads no model with packed zeros, and int8 of it as it is, without scales.
    """
    from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    words, whole = PackedQuantizationCompressor, NaiveQuantizationCompressor
    for layout, about, library in (
        ("words with zeros", _compressed(4, False, False), words),
        ("words shuffled", _compressed(4, False, True), words),
        ("int8", _whole("int", "channel"), whole),
    ):
        made = folder / f"{layout.replace(' ', '-')}-matrices"
        save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")
        rewrite(made, layout)
        held = load_file(made / "model.safetensors")
        try:
            scheme = QuantizationScheme(**about["config_groups"]["group_0"])
        except ValueError as error:
            print(f"compressed-tensors refuses {layout}: {str(error).splitlines()[2].strip()}")
            continue
        wanted = {}
        for scale in [name for name in held if name.endswith(".weight_scale")]:
            base = scale.removesuffix("_scale")
            own = {key.removeprefix(base.removesuffix("weight")):
                   torch.tensor(each.astype(np.float32) if key == scale else each)
                   for key, each in held.items() if key.startswith(base)}  # fmt: skip
            wanted[base] = library.decompress(own, scheme)["weight"].float().numpy()
        yield f"{layout} (compressed-tensors, a matrix)", _worst(load_model(made), wanted)


def block_fp8(folder: Path) -> Iterator[tuple[str, float]]:
    """Blocks of fp8, which transformers itself multiplies out."""
    made = folder / "blocks"
    save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")
    rewrite(made, "blocks of fp8")
    found = ours(load_model(made))
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 16))
    yield (
        "blocks of fp8 (transformers)",
        difference(found, theirs(made, quantization_config=config)),
    )


def bitsandbytes(folder: Path) -> Iterator[tuple[str, float]]:
    """Matrices that bitsandbytes quantizes and multiplies out."""
    import bitsandbytes.functional as bnb

    for name, kind, nested in (("nf4", "nf4", False), ("nf4, nested", "nf4", True),
                               ("fp4", "fp4", False)):  # fmt: skip
        made = folder / name.replace(", ", "-")
        save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")

        def write(base: str, matrix: Any, kind: str = kind, nested: bool = nested) -> Any:
            codes, state = bnb.quantize_4bit(
                matrix, quant_type=kind, blocksize=64, compress_statistics=nested
            )
            parts = {f"{base}.weight.{key}": each for key, each in state.as_dict(True).items()}
            return {f"{base}.weight": codes} | parts, bnb.dequantize_4bit(codes, state)

        about = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield f"{name} (bitsandbytes)", _against(made, about, write)

    made = folder / "int8"
    save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")

    def rows(base: str, matrix: Any) -> Any:
        codes, most, _ = bnb.int8_vectorwise_quant(matrix.half())
        parts = {f"{base}.weight": codes, f"{base}.SCB": most,
                 f"{base}.weight_format": torch.zeros((), dtype=torch.uint8)}  # fmt: skip
        return parts, bnb.int8_vectorwise_dequant(codes, most)

    yield "int8 (bitsandbytes)", _against(made, {"load_in_8bit": True}, rows)


def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_arithmetic(folder: Path) -> Iterator[tuple[str, float]]:
    """Random codes in GPTQ's and AWQ's layouts, by the files that were named."""
    gptq, awq = map(_module, sys.argv[1:3])

    def of_gptq(bits: int, parts: dict[str, Any]) -> np.ndarray:
        outputs, inputs = parts["scales"].shape[1], parts["g_idx"].shape[0]
        layer = gptq.QuantLinear(bits, inputs // len(parts["scales"]), inputs, outputs, False,
                                 weight_dtype=torch.float32)  # fmt: skip
        for name, each in parts.items():
            setattr(layer, name, each.float() if name == "scales" else each)
        return layer(torch.eye(inputs)).T.numpy()

    def of_awq(bits: int, parts: dict[str, Any]) -> np.ndarray:
        group = len(parts["qweight"]) // len(parts["scales"])
        scales = parts["scales"].float()
        whole = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], scales, bits, group)
        return whole.T.numpy()

    for layout, bits, make in (("gptq 4 bits", 4, of_gptq), ("gptq 8 bits shuffled", 8, of_gptq),
                               ("awq", 4, of_awq)):  # fmt: skip
        made = folder / layout.replace(" ", "-")
        save_model(tiny_model(tie_embeddings=False, **_SHAPE), made, dtype="float32")
        rewrite(made, layout)
        held = load_file(made / "model.safetensors")
        wanted = {}
        for name in [name for name in held if name.endswith(".qweight")]:
            base = name.removesuffix("qweight")
            own = {key.removeprefix(base): torch.tensor(each) for key, each in held.items()
                   if key.startswith(base)}  # fmt: skip
            wanted[f"{base}weight"] = make(bits, own)
        yield (
            f"{layout} ({'AutoAWQ' if make is of_awq else 'AutoGPTQ'})",
            _worst(load_model(made), wanted),
        )


def _against(folder: Path, about: dict[str, Any], write: Callable[..., Any]) -> float:
    """The largest difference of the matrices that we read to those that `write` gives."""
    file = folder / "model.safetensors"
    held = load_file(file)
    wanted = {}
    for name in [name for name in held if name.endswith("_proj.weight")]:
        parts, own = write(name.removesuffix(".weight"), torch.tensor(held.pop(name)))
        held |= {key: each.contiguous().numpy() for key, each in parts.items()}
        wanted[name] = own.float().numpy()
    save_file(held, file)
    config = folder / "config.json"
    about = {"quant_method": "bitsandbytes"} | about
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": about}))
    return _worst(load_model(folder), wanted)


def _worst(model: Model, wanted: dict[str, np.ndarray]) -> float:
    """The largest difference of some of a model's matrices to those that are wanted."""
    found = []
    for number, layer in enumerate(model.layers):
        for leaf, name in (("query", "self_attn.q_proj"), ("down", "mlp.down_proj")):
            own = getattr(layer, leaf)
            assert isinstance(own, PackedWeight)
            key = f"model.layers.{number}.{name}.weight"
            whole = np.asarray(own.unpacked())
            if own.order is not None:  # inputs in the order of their groups
                whole = whole[:, np.argsort(np.asarray(own.order))]
            found.append(difference(whole, wanted[key]))
    return max(found)


def main() -> int:
    """Prints the largest difference of each; 1 if one is larger than rounding explains."""
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="specjax-") as name:
        parts = [written_by_us, tables_by_us, read_by_both, by_matrix, block_fp8, bitsandbytes]
        for part in [*parts, *([by_arithmetic] if sys.argv[1:] else [])]:
            try:
                for what, found in part(Path(name)):
                    print(f"{found:.2e}  {what}", flush=True)
                    worst = max(worst, found)
            except Exception as error:
                print(f"{part.__name__} failed: {type(error).__name__}: {error}", flush=True)
                worst = float("inf")
    print(f"jax {jax.__version__}, torch {torch.__version__}, transformers "
          f"{transformers.__version__}")  # fmt: skip
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
