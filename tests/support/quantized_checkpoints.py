"""Quantized checkpoints of small models, each with the weights that its writer says it holds.

compressed-tensors and bitsandbytes write their own formats, and say what the codes stand for. No
library that writes GPTQ or AWQ installs from PyPI alone: those are written here from the formats'
descriptions, one code at a time. DeepSeek's and gpt-oss's formats likewise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
GROUP = 16
"""Divides all sizes of the small models."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Packed(NamedTuple):
    """One weight, quantized."""

    tensors: dict[str, Tensor]
    """By the end of their names, after the module's path."""
    values: Tensor
    """What they stand for, fp32 `[out, in]`."""


Pack = Callable[[Tensor], Packed]


class Format(NamedTuple):
    """A way to quantize a checkpoint."""

    name: str
    writer: str
    """The library that writes it, or description."""
    pack: Pack
    settings: Mapping[str, Any]
    """The configuration's `quantization_config`."""
    multiple: int = 1
    """Matrices are quantized whose inputs are a multiple of this."""


SHARED_GATE = ".shared_expert_gate.weight"
"""A linear layer with one output, which tools leave as it is."""
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def write_checkpoint(
    dense: Path,
    folder: Path,
    form: Format,
    *,
    but: Sequence[str] = (),
    ends: Sequence[str] = (),
) -> Path:
    """Quantize the decoder's matrices of a saved model into the folder, `but` some by their names,
    and the `ends`, by theirs.

    Those of `dense` are set to the values that the codes stand for.
    """
    tensors = load_file(dense / WEIGHTS)
    matrices = {
        name: _without_zero_rows(tensor)
        for name, tensor in tensors.items()
        if (is_quantized(name, tensor) or name in ends)
        and tensor.shape[1] % form.multiple == 0
        and not any(part in name for part in but)
    }
    _, packed = write_weights(folder, matrices, form)
    tensors |= {name: each.values for name, each in packed.items()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in packed}
    _save(load_file(folder / WEIGHTS) | rest, folder)
    _save(tensors, dense)
    for path in dense.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    _write_config(dense, folder, form.settings)
    return folder


def write_weights(
    folder: Path, weights: Mapping[str, Tensor], form: Format
) -> tuple[Path, dict[str, Packed]]:
    """Write these weights, `*.weight`, into the folder; returns it and what was written."""
    packed = {name: form.pack(weight) for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name.removesuffix('.weight')}.{end}": part
        for name, each in packed.items()
        for end, part in each.tensors.items()
    }
    _save(tensors, folder)
    config = {"model_type": "llama", "quantization_config": dict(form.settings)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, packed


def gpt_oss_experts(dense: Path, folder: Path) -> Path:
    """The same for gpt-oss's stacked experts."""
    tensors = load_file(dense / WEIGHTS)
    written: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, groups, 32]
        exponents = (groups.abs().amax(dim=3) / 6).log2().ceil()
        steps = groups / exponents.exp2()[..., None]
        codes = (steps[..., None] - E2M1).abs().argmin(dim=-1)
        values = E2M1[codes] * exponents.exp2()[..., None]
        tensors[name] = values.flatten(2).transpose(1, 2).contiguous()
        halves = codes.unflatten(3, (16, 2))
        written[f"{name}_blocks"] = (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8)
        written[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    folder.mkdir()
    _save(written, folder)
    _save(tensors, dense)
    _write_config(dense, folder, {"quant_method": "mxfp4"})
    return folder


def _without_zero_rows(matrix: Tensor) -> Tensor:
    """The row of a padding token is zero, and not every writer here can scale that."""
    signs = torch.arange(matrix.shape[1]) % 2 * 2 - 1
    return matrix.where(matrix.any(dim=1, keepdim=True), signs / 100)


def _save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})


def _write_config(dense: Path, folder: Path, settings: Mapping[str, Any]) -> None:
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether quantization tools quantize this: matrices of the decoder's linear layers."""
    is_router = name.endswith((".gate.weight", ".router.weight", SHARED_GATE))
    return tensor.ndim == 2 and ".layers." in name and name.endswith(".weight") and not is_router


def gptq(
    weight: Tensor,
    *,
    group: int = GROUP,
    bits: int = 4,
    version: int = 1,
    is_symmetric: bool = False,
    has_order: bool = False,
) -> Packed:
    out_features, in_features = weight.shape
    num_groups, largest = in_features // group, (1 << bits) - 1
    groups = torch.arange(in_features) // group
    if has_order:
        groups = groups[torch.randperm(in_features, generator=_generator(in_features))]
    scales, zeros = torch.empty(num_groups, out_features), torch.empty(num_groups, out_features)
    for index in range(num_groups):
        columns = weight[:, groups == index]
        low, high = columns.amin(dim=1).clamp(max=0), columns.amax(dim=1).clamp(min=0)
        if is_symmetric:
            scales[index] = 2 * torch.maximum(-low, high) / largest
            zeros[index] = (largest + 1) // 2
        else:
            scales[index] = (high - low) / largest
            zeros[index] = (-low / scales[index]).round()
    scales = scales.half()
    by_input = scales.float()[groups].T
    codes = (weight / by_input + zeros[groups].T).round().clamp(0, largest)
    stored_zeros = zeros.int() - (1 if version == 1 else 0)
    tensors = {
        "qweight": _words(codes.int().T, bits, dim=0),
        "qzeros": _words(stored_zeros & largest, bits, dim=1),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return Packed(tensors, (codes - zeros[groups].T) * by_input)


def awq(weight: Tensor, *, group: int = GROUP) -> Packed:
    plain = gptq(weight, group=group)
    values, scales = plain.values, plain.tensors["scales"]
    by_input = scales.float().repeat_interleave(group, dim=0).T
    steps = (values / by_input).round().int()
    zeros = -steps.unflatten(1, (-1, group)).amin(dim=2).T
    codes = (steps + zeros.repeat_interleave(group, dim=0).T).T
    tensors = {"qweight": _awq_words(codes), "qzeros": _awq_words(zeros), "scales": scales}
    return Packed(tensors, values)


def deepseek(weight: Tensor, *, block: int = 32) -> Packed:
    """float8 with a scale for each square block."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scales, values = torch.empty(rows, columns), torch.empty(weight.shape)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * block, (row + 1) * block),
                slice(column * block, (column + 1) * block),
            )
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            values[place] = codes[place].float() * scales[row, column]
    return Packed({"weight": codes, "weight_scale_inv": scales}, values)


def fbgemm_fp8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}
    return Packed(tensors, codes.float() * scale)


def modelopt_fp8(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return Packed(tensors, codes.float() * scale)


def bitsandbytes_4bit(weight: Tensor, *, kind: str, is_nested: bool) -> Packed:
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(
        weight, quant_type=kind, compress_statistics=is_nested, blocksize=64
    )
    tensors = {"weight": codes}
    for name, tensor in state.as_dict(packed=True).items():
        tensors[f"weight.{name}"] = tensor
    # As one row: with AVX-512 it gives wrong values where a block ends within a row.
    state.shape = (1, weight.numel())
    values = bnb.dequantize_4bit(codes, state).float()
    return Packed(tensors, values.view(weight.shape))


def bitsandbytes_8bit(weight: Tensor) -> Packed:
    import bitsandbytes.functional as bnb

    codes, scale, _ = bnb.int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(tensors, bnb.int8_vectorwise_dequant(codes, scale).float())


def compressed(weight: Tensor, *, kind: str, **weights: Any) -> Packed:
    """By the compressor of compressed-tensors of this name."""
    import compressed_tensors.compressors as compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor: Any = compressors.BaseCompressor.get_value_from_registry(kind)
    state = {"weight": weight, **_parameters(weight, scheme.weights)}
    tensors = compressor.compress(state, scheme)
    if "weight_global_scale" in tensors:  # decompressed in bf16 only
        return Packed(tensors, _nvfp4_values(tensors))
    return Packed(tensors, compressor.decompress(dict(tensors), scheme)["weight"].float())


def _nvfp4_values(tensors: Mapping[str, Tensor]) -> Tensor:
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    packed = tensors["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    return E2M1[codes.long()] * scale.repeat_interleave(16, dim=1)


def _parameters(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales and zero points of this weight, computed by compressed-tensors."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = args.group_size or weight.shape[1]
    found: dict[str, Tensor] = {}
    total = None
    if args.strategy == "tensor_group":
        total = generate_gparam(weight.amin().view(1), weight.amax().view(1))
        found["weight_global_scale"] = total
    if args.strategy == "tensor":
        low, high = weight.amin().view(1), weight.amax().view(1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        missing = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        blocks = F.pad(weight, missing).unfold(0, rows, rows).unfold(1, columns, columns).flatten(2)
        low, high = blocks.amin(dim=2), blocks.amax(dim=2)
    else:
        groups = weight.unflatten(1, (-1, group))
        low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale, zero = calculate_qparams(low, high, args, global_scale=total)
    found["weight_scale"] = scale
    if not args.symmetric:
        found["weight_zero_point"] = zero
    return found


def _words(codes: Tensor, bits: int, *, dim: int) -> Tensor:
    """int32 words of codes along a dimension: a stream of bits, the lowest first."""
    stream = (codes.movedim(dim, -1)[..., None] >> torch.arange(bits) & 1).flatten(-2)
    stream = F.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (stream.long() << torch.arange(32)).sum(dim=-1)
    signed: Tensor = words.to(torch.uint32).view(torch.int32).movedim(-1, dim)
    return signed


def _awq_words(codes: Tensor) -> Tensor:
    """int32 `[n, out / 8]` of codes `[n, out]`."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, output::8].long() << (4 * place)
    return words.to(torch.uint32).view(torch.int32)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _gptq_format(
    name: str,
    group: int,
    *,
    version: int = 1,
    bits: int = 4,
    is_symmetric: bool = False,
    has_order: bool = False,
) -> Format:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "sym": is_symmetric,
        "desc_act": has_order,
    }
    pack = partial(
        gptq,
        group=group,
        version=version,
        bits=bits,
        is_symmetric=is_symmetric,
        has_order=has_order,
    )
    return Format(name, "description", pack, settings)


def _compressed_format(name: str, kind: str, **weights: Any) -> Format:
    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    pack = partial(compressed, kind=kind, **weights)
    return Format(name, "compressed-tensors", pack, settings, weights.get("group_size") or 1)


def _bitsandbytes_format(kind: str, *, is_nested: bool = False) -> Format:
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
    }
    pack = partial(bitsandbytes_4bit, kind=kind, is_nested=is_nested)
    return Format(f"{kind}-nested" if is_nested else kind, "bitsandbytes", pack, settings)


_PACKED, _FLOAT = "pack-quantized", "float-quantized"


def formats(group: int) -> dict[str, Format]:
    """Every format by name; those whose groups have a free size have groups of this one."""
    made = (
        _gptq_format("gptq", group),
        _gptq_format("gptq-v2", group, version=2),
        _gptq_format("gptq-symmetric", group, is_symmetric=True),
        _gptq_format("gptq-ordered", group, has_order=True),
        _gptq_format("gptq-8bit", group, bits=8),
        _gptq_format("gptq-3bit", group, bits=3),
        _gptq_format("gptq-2bit", group, bits=2, version=2),
        Format(
            "awq",
            "description",
            partial(awq, group=group),
            {"quant_method": "awq", "bits": 4, "group_size": group},
        ),
        _compressed_format("ct-int4", _PACKED, num_bits=4, strategy="group", group_size=group),
        _compressed_format(
            "ct-int4-asymmetric",
            _PACKED,
            num_bits=4,
            strategy="group",
            group_size=group,
            symmetric=False,
        ),
        _compressed_format("ct-int8", _PACKED, num_bits=8, strategy="channel"),
        _compressed_format("ct-w8a8", "int-quantized", num_bits=8, strategy="channel"),
        _compressed_format("ct-fp8-channel", _FLOAT, num_bits=8, type="float", strategy="channel"),
        _compressed_format("ct-fp8-tensor", _FLOAT, num_bits=8, type="float", strategy="tensor"),
        _compressed_format(
            "ct-fp8-block",
            _FLOAT,
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[16, 32],
        ),
        _compressed_format(
            "ct-mxfp4",
            "mxfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype="torch.uint8",
        ),
        _compressed_format(
            "ct-nvfp4",
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
        ),
        _bitsandbytes_format("nf4"),
        _bitsandbytes_format("nf4", is_nested=True),
        _bitsandbytes_format("fp4"),
        Format(
            "bnb-int8",
            "bitsandbytes",
            bitsandbytes_8bit,
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
        ),
        Format(
            "deepseek-fp8",
            "description",
            deepseek,
            {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
        ),
        Format("fbgemm-fp8", "description", fbgemm_fp8, {"quant_method": "fbgemm_fp8"}),
        Format("modelopt-fp8", "description", modelopt_fp8, {"quant_method": "modelopt"}),
    )
    return {form.name: form for form in made}


FORMATS = formats(GROUP)
"""For the small models."""
