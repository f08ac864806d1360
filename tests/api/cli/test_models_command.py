"""`loraplex models check` says before serving what a loaded base then is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.cli.models import PROMPTS
from loraplex.engine.checkpoint import stored_weights
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.kv.cache import kv_bytes_per_block
from loraplex.engine.kv.groups import group_layers
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.kernels.joined_linear import JoinedLinear
from loraplex.kernels.quantize import WeightFormat, quantize
from support import length_ropes
from support.families import SERVED, save_family
from support.gguf_files import mixture, write_model
from support.length_ropes import BORDER
from support.marks import marked_slow
from support.models import make_tiny_llama, save_byte_tokenizer
from support.quantized_checkpoints import FORMATS, WEIGHTS, write_checkpoint

Run = Callable[..., tuple[int, str, str]]
SAMPLE = {"gptq", "ct-fp8-block"}
FAMILIES = (
    ("qwen3_moe", "awq"),
    *(("phi3-fused", "ct-int4-asymmetric"), ("mixtral", "gptq"), ("opt", "nf4")),
    *(("deepseek_v3-mla", "deepseek-fp8"), ("gemma3-window", "ct-fp8-block")),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `models check` on the CPU: exit code, stdout, stderr."""

    def run(path: Path, *options: str) -> tuple[int, str, str]:
        arguments = ("check", str(path), "--device", "cpu", *options)
        monkeypatch.setattr("sys.argv", ["loraplex", "models", *arguments])
        try:
            code = cli.main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def ask(run: Run, path: Path, *options: str) -> Any:
    code, out, err = run(path, *options, "--json")
    assert code == ExitCode.OK, err
    return json.loads(out)


@pytest.mark.parametrize("form", marked_slow(FORMATS, slow=FORMATS.keys() - SAMPLE))
def test_a_quantized_checkpoint_is_served_as_the_report_says(
    form: str, run: Run, tmp_path: Path
) -> None:
    path = save_packed(tmp_path, "llama", form)
    assert_as_loaded(ask(run, path), load(path))


@pytest.mark.parametrize("names", marked_slow(FAMILIES, slow=FAMILIES[1:]), ids="-".join)
def test_other_families_are_served_as_the_report_says(
    names: tuple[str, str], run: Run, tmp_path: Path
) -> None:
    path = save_packed(tmp_path, *names)
    assert_as_loaded(ask(run, path), load(path))


@pytest.mark.parametrize(
    "quantize", marked_slow(Quantization, slow=set(Quantization) - {"none", "int8"})
)
def test_a_base_that_is_quantized_at_load_is_served_as_the_report_says(
    quantize: Quantization, run: Run, tiny_base: Path
) -> None:
    config = EngineConfig(str(tiny_base), device="cpu", quantization=quantize)
    assert_as_loaded(ask(run, tiny_base, "--quantize", quantize), load_base_model(config))


@pytest.mark.parametrize("is_tied", marked_slow([True, False], slow=[False]))
def test_ends_that_are_quantized_at_load_are_served_as_the_report_says(
    is_tied: bool, run: Run, tmp_path: Path
) -> None:
    path = make_tiny_llama(tmp_path, tie_word_embeddings=is_tied)
    config = EngineConfig(str(path), device="cpu", embedding_quantization=Quantization.INT8)
    base = load_base_model(config)
    options = ("--quantize-embeddings", "int8", "--reference", str(path))
    report = ask(run, path, *options)
    assert_as_loaded(report, base)
    weights = report["weights"]
    assert weights["embedding"]["served_bytes"] == base.packed_ends.served_table.num_bytes
    head_bytes = base.packed_ends.served_head.num_bytes
    assert weights.get("output head", {"served_bytes": 0})["served_bytes"] == head_bytes
    stored = load_file(path / WEIGHTS)
    errors = report["errors"]["projections"]
    assert errors.keys() == ({"embed_tokens"} if is_tied else {"embed_tokens", "lm_head"})
    for name, found in errors.items():
        (weight,) = (tensor for key, tensor in stored.items() if name in key)
        difference = quantize(weight, WeightFormat.INT8).dequantize() - weight
        assert found["mean"] == pytest.approx(float(difference.norm() / weight.norm()), rel=1e-4)
    assert "The format of the weights is embedding and output head int8." in run(path, *options)[1]


def test_a_gguf_file_is_served_as_the_report_says(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save_gguf(tmp_path / "model.gguf")
    report = ask(run, path)
    assert_as_loaded(report, load(path))
    assert report["quantization"] == "gguf-q4_0"
    embedding = report["weights"]["embedding"]
    assert embedding["formats"] == {"gguf-q8_0": 1}
    assert embedding["num_made_dense"] == 0


def test_the_lengths_at_which_rotary_frequencies_change_are_reported(
    run: Run, tmp_path: Path
) -> None:
    path = length_ropes.save(tmp_path, "phi3")
    save_byte_tokenizer(path)
    assert_as_loaded(ask(run, path), load(path))
    text = f"Requests of up to {BORDER} tokens, prompt and max_tokens together, get the rotary"
    assert text in run(path)[1]


def test_quantized_experts_are_said_to_stay_quantized(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "qwen3_moe", "awq")
    report = ask(run, path)
    assert_as_loaded(report, load(path))
    experts = report["weights"]["experts"]
    assert (experts["num_quantized"], experts["num_made_dense"]) == (24, 0)
    assert experts["served_bytes"] < 1.2 * experts["file_bytes"]
    assert "become float32" not in run(path)[1]


def test_experts_that_are_quantized_at_load_are_served_as_the_report_says(
    run: Run, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED["gpt_oss-sinks-window"])
    save_byte_tokenizer(path)
    config = EngineConfig(str(path), device="cpu", quantization=Quantization.INT4)
    report = ask(run, path, "--quantize", "int4")
    assert_as_loaded(report, load_base_model(config))
    experts = report["weights"]["experts"]
    assert experts["served_bytes"] < 0.15 * experts["file_bytes"], "from 32 bits to 4"


def test_groups_and_excluded_layers_are_served_as_the_report_says(run: Run, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["gpt_oss-sinks-window"])
    save_byte_tokenizer(path)
    globs = ("*.q_proj", "*.layers.0.mlp.experts.down_proj", "*.layers.1.mlp.*")
    config = EngineConfig(
        str(path),
        device="cpu",
        quantization=Quantization.INT8,
        quantization_group_size=16,
        quantization_exclude=globs,
    )
    options = ["--quantize", "int8", "--quantize-group-size", "16", "--reference", str(path)]
    options += [word for glob in globs for word in ("--quantize-exclude", glob)]
    report = ask(run, path, *options)
    assert_as_loaded(report, load_base_model(config))
    assert report["quantization"] == "int8, groups of 16, 5 layers excluded"
    assert report["weights"]["experts"]["kernels"] == {"PanelExperts": 1, "grouped_linear": 3}
    errors = report["errors"]["projections"]
    numbers = {name: found["num_weights"] for name, found in errors.items()}
    assert numbers == {"k_proj": 2, "v_proj": 2, "o_proj": 2, "experts.gate_up_proj": 1}
    stored = load_file(path / WEIGHTS)
    originals = [stored[f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in (0, 1)]
    relative = [
        float((quantize(each, WeightFormat.INT8, 16).dequantize() - each).norm() / each.norm())
        for each in originals
    ]
    assert errors["o_proj"]["mean"] == pytest.approx(sum(relative) / 2, rel=1e-4)
    assert "is int8, groups of 16, 5 layers excluded." in run(path, *options)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantize-group-size", "32"), "quantization_group_size: requires --quantize"),
        (("--quantize", "mxfp4", "--quantize-group-size", "64"), "mxfp4 has groups of 32 inputs"),
        (("--quantize", "int4", "--quantize-exclude", "*.q"), "*.q matches no linear layer"),
    ],
    ids=str,
)
def test_options_of_quantization_that_cannot_be_applied_are_refused(
    options: tuple[str, ...], message: str, run: Run, tiny_base: Path
) -> None:
    code, _, err = run(tiny_base, *options)
    assert code == ExitCode.USAGE
    assert message in err


@pytest.mark.slow
def test_experts_of_several_forms_are_said_to_become_dense(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "qwen3_moe", "awq", but=["experts.1.down_proj"])
    report = ask(run, path)
    assert_as_loaded(report, load(path))
    experts = report["weights"]["experts"]
    # Of both layers, the down projections of all four experts but the one that was not quantized.
    assert experts["num_made_dense"] == 2 * 3
    assert experts["kernels"] == {"PanelExperts": 2, "grouped_linear": 2}
    assert "become float32 at load." in run(path)[1]


def test_the_report_says_what_fits(run: Run, tiny_base: Path) -> None:
    memory = ask(run, tiny_base, "--memory-gib", "3")["memory"]
    assert memory["fits"]
    available = (3 << 30) - load(tiny_base).weight_bytes
    assert memory["reserve_bytes"] == int(available * 0.1)
    assert memory["kv_tokens"] * memory["kv_bytes_per_token"] == memory["kv_bytes"]
    # Llama's q, k, v, o, gate, up and down, in two layers.
    sizes = 2 * [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert memory["adapter_bytes"] == 4 * 16 * sum(map(sum, sizes))
    assert memory["num_rank_16_adapters"] == memory["arena_bytes"] // memory["adapter_bytes"]
    code, out, _ = run(tiny_base, "--memory-gib", "3")
    assert code == ExitCode.OK
    assert f"The KV cache holds {memory['kv_tokens']:,} tokens" in out


def test_a_base_that_does_not_fit_is_reported_and_the_command_fails(
    run: Run, tiny_base: Path
) -> None:
    code, out, _ = run(tiny_base, "--memory-gib", "0.5")  # the host cache alone takes 1 GiB
    assert code == ExitCode.USAGE
    assert "The model does not fit into 512.00 MiB. Not enough memory" in out
    code, out, _ = run(tiny_base, "--memory-gib", "0.5", "--json")
    assert (code, json.loads(out)["memory"]["fits"]) == (ExitCode.USAGE, False)


def test_a_gpu_that_is_not_here_can_be_planned_for(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "llama", "gptq")
    report = ask(run, path, "--device", "cuda", "--memory-gib", "24")
    assert report["device"] == "cuda"
    assert report["weights"]["linear layers"]["kernels"] == {"WNA16Linear": 8}


def test_a_refused_base_is_reported_with_its_code(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "llama", "gptq")
    tensors = load_file(path / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    code, _, err = run(path)
    assert code == ExitCode.USAGE
    assert "lack model.norm.weight" in err
    assert err.rstrip().endswith("(base_weights_missing)")
    code, out, _ = run(path, "--json")
    assert code == ExitCode.USAGE
    assert json.loads(out)["code"] == "base_weights_missing"


def test_a_base_without_a_tokenizer_is_refused(run: Run, tmp_path: Path) -> None:
    save_family(tmp_path, *SERVED["llama"])
    code, _, err = run(tmp_path)
    assert code == ExitCode.USAGE
    assert err.rstrip().endswith("(base_tokenizer)")


def test_no_weight_is_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_packed(tmp_path, "qwen3_moe", "gptq")

    def read(_weight: object) -> Tensor:
        raise AssertionError("a weight is read")

    for kind in (stored_weights.StoredWeight, stored_weights.StoredPackedWeight):
        monkeypatch.setattr(kind, "read", read)
    monkeypatch.setattr("loraplex.engine.checkpoint.weights._LazyTensor.__getitem__", read)
    assert ask(run, path)["served"]


def test_the_error_is_that_of_the_values_to_the_reference(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "llama", "gptq")
    report = ask(run, path, "--reference", str(tmp_path / "original"))
    original, values = (load_file(tmp_path / name / WEIGHTS) for name in ("original", "dense"))
    expected: dict[str, list[float]] = {}
    for name, weight in original.items():
        if "_proj" in name:
            error = float((weight - values[name]).norm() / weight.norm())
            expected.setdefault(name.split(".")[-2], []).append(error)
    found = report["errors"]["projections"]
    assert found.keys() == expected.keys()
    for kind, errors in expected.items():
        assert found[kind]["mean"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)
        assert found[kind]["worst"] == pytest.approx(max(errors), rel=1e-4)
        assert found[kind]["num_weights"] == len(errors) == 2
    assert report["errors"]["num_not_compared"] == 0


def test_the_error_of_quantizing_at_load_is_measured_too(run: Run, tmp_path: Path) -> None:
    path = save_family(tmp_path / "gpt2", *SERVED["gpt2-conv1d"])  # its matrices are transposed
    save_byte_tokenizer(path)
    report = ask(run, path, "--quantize", "int4", "--reference", str(path))
    weights = load_file(path / WEIGHTS)
    names = [f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1)]
    errors = [
        float((quantize(weight, WeightFormat.INT4).dequantize() - weight).norm() / weight.norm())
        for weight in (weights[name].T.contiguous() for name in names)
    ]
    found = report["errors"]["projections"]["c_attn"]
    assert found["mean"] == pytest.approx(sum(errors) / 2, rel=1e-4)


def test_a_projection_that_stays_dense_has_no_error(run: Run, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["deepseek_v3-mla"])
    save_byte_tokenizer(path)
    report = ask(run, path, "--quantize", "int4", "--reference", str(path))
    projections = report["errors"]["projections"]
    assert "kv_b_proj" not in projections
    assert projections["o_proj"]["mean"] > 0.01


def test_a_reference_must_be_the_unquantized_model(run: Run, tmp_path: Path) -> None:
    path = save_packed(tmp_path, "llama", "gptq")
    code, _, err = run(path, "--reference", str(path))
    assert code == ExitCode.USAGE
    assert "is quantized itself" in err
    other = save_family(tmp_path / "other", *SERVED["llama"][:1], {"intermediate_size": 128})
    code, _, err = run(path, "--reference", str(other))
    assert code == ExitCode.USAGE
    assert "another model" in err
    code, _, err = run(tmp_path / "original", "--reference", str(tmp_path / "original"))
    assert code == ExitCode.USAGE
    assert "is not quantized" in err


def test_kl_is_that_of_the_two_models_logits(run: Run, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "original", initializer_range=0.05)
    path = pack(tmp_path, "gptq")
    drift = ask(run, path, "--reference", str(tmp_path / "original"), "--kl")["drift"]
    original, values = (dense_log_probs(tmp_path / name) for name in ("original", "dense"))
    divergences = (original.exp() * (original - values)).sum(dim=-1)
    assert drift["kl_mean"] == pytest.approx(float(divergences.mean()), rel=1e-3)
    assert drift["kl_max"] == pytest.approx(float(divergences.max()), rel=1e-3)
    assert drift["num_probes"] == len(divergences)
    changed = (original.argmax(dim=-1) != values.argmax(dim=-1)).sum()
    assert drift["top_token_changed"] == int(changed)


def test_kl_needs_a_reference(run: Run, tiny_base: Path) -> None:
    code, _, err = run(tiny_base, "--kl")
    assert (code, err) == (ExitCode.USAGE, "Error: --kl compares with --reference: give it\n")


def save_packed(tmp_path: Path, family: str, form: str, *, but: Sequence[str] = ()) -> Path:
    """A quantized checkpoint, beside `original` and `dense`, which has the values of its codes."""
    save_family(tmp_path / "original", *SERVED[family])
    save_byte_tokenizer(tmp_path / "original")
    return pack(tmp_path, form, but=but)


def pack(tmp_path: Path, form: str, *, but: Sequence[str] = ()) -> Path:
    dense = tmp_path / "dense"
    dense.mkdir()
    for path in (tmp_path / "original").iterdir():
        (dense / path.name).write_bytes(path.read_bytes())
    return write_checkpoint(dense, tmp_path / "packed", FORMATS[form], but=but)


def save_gguf(path: Path) -> Path:
    """A Llama with a quantized embedding."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    kinds = {"token_embd": "Q8_0", "attn_v": "Q5_1", "output": "F16"}
    write_model(path, config, "llama", kind_of=mixture(kinds, "Q4_0"))
    return path


def load(path: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu"))


def dense_log_probs(path: Path) -> Tensor:
    """Of transformers' own model, at all positions of the command's prompts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = Tokenizer(path)
    logits = [model(torch.tensor([tokenizer.encode(text)])).logits[0].detach() for text in PROMPTS]
    return torch.cat(logits).double().log_softmax(dim=-1)


def assert_as_loaded(report: Any, base: BaseModel) -> None:
    assert report["model_type"] == base.config.model_type
    assert report["num_parameters"] == base.num_parameters
    assert report["quantization"] == base.quantization
    assert report["served_bytes"] == pytest.approx(base.weight_bytes, rel=0.02)
    assert report["max_model_len"] == base.max_model_len
    assert report["rotary_contexts"] == list(base.rotary_contexts.lengths)
    kernels: Counter[str] = Counter()
    for part in report["weights"].values():
        kernels += Counter(part["kernels"])
    del kernels["grouped_linear"]
    assert kernels == linear_classes(base) + Counter(
        type(experts).__name__ for experts in base.packed_experts
    )
    groups = group_layers(base.kv_shapes, max_model_len=base.max_model_len)
    assert report["memory"]["kv_bytes_per_token"] == sum(
        kv_bytes_per_block(group, base.kv_shapes, block_size=1, kv_format=base.kv_format)
        for group in groups
    )


def linear_classes(base: BaseModel) -> Counter[str]:
    parts = [
        part
        for linear in base.linears
        for part in (linear.children() if isinstance(linear, JoinedLinear) else [linear])
    ]
    return Counter(type(part).__name__ for part in parts)
