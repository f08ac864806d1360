"""Names that users of vLLM try, with what to do instead.

Options of vLLM that mean the same as ours are aliases of ours, in their declarations
(`Option.aliases`). Here are those that mean something else or that do not exist here. Source: the
arguments of `vllm serve`, version 0.11 (docs.vllm.ai, "Engine Arguments" and "CLI Reference").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

_ALWAYS = "Omit it: this is always on"
_PROXY = "A proxy in front of the server does this (docs/operations.md)."
_CODE = "Code of a checkpoint is never run: omit it."
_FOLDER = "It is found in the model's folder: omit it."
_LAYOUT = "Omit it: the engine chooses this itself."
_FLEET = "Use a fleet of replicas: `loraplex fleet --help`."
_MODALITIES = "Images, audio and video are not served: of a multimodal model the text part is."
_REQUESTS = "There is no such setting: requests have this value."

OPTIONS: Mapping[str, str] = {
    # Memory
    "gpu-memory-utilization": "--memory-gib limits the memory in GiB, not as a share. By default "
    "it is the free memory, less a reserve: omit it, or set --memory-gib.",
    "kv-cache-memory-bytes": "Set --kv-cache-gib, in GiB.",
    "num-gpu-blocks-override": "Set --kv-cache-gib, in GiB.",
    "cpu-offload-gb": "Weights are not offloaded to host memory. --quantize makes the base "
    "smaller.",
    "block-size": _LAYOUT,
    "calculate-kv-scales": _LAYOUT,
    # Adapters
    "enable-lora": f"{_ALWAYS}. Add adapters with `loraplex adapters push FOLDER NAME`.",
    "lora-modules": "Add them to the running server: `loraplex adapters import NAME=PATH ...`.",
    "max-loras": "Omit it: a batch mixes any number of adapters. --arena-gib sets their device "
    "memory.",
    "max-lora-rank": "Omit it: adapters of any rank are served. --arena-gib sets their device "
    "memory.",
    "max-cpu-loras": "--host-cache-gib sets the host memory for adapters.",
    "lora-dtype": _LAYOUT,
    "lora-extra-vocab-size": "Omit it: added tokens of adapters are served.",
    "fully-sharded-loras": "Omit it: adapters are divided as the base is.",
    "enable-prompt-adapter": "Prompt adapters are not served, only LoRA adapters.",
    # The model and its text
    "tokenizer": _FOLDER,
    "tokenizer-mode": _FOLDER,
    "skip-tokenizer-init": "A server needs the tokenizer: omit it.",
    "hf-config-path": _FOLDER,
    "hf-overrides": "Change config.json in a copy of the model's folder.",
    "rope-scaling": "Set rope_parameters in config.json in a copy of the model's folder.",
    "rope-theta": "Set rope_parameters in config.json in a copy of the model's folder.",
    "revision": "Download the revision and serve its folder: `hf download OWNER/NAME --revision "
    "REVISION --local-dir FOLDER`.",
    "tokenizer-revision": "Download the revision and serve its folder.",
    "code-revision": _CODE,
    "trust-remote-code": _CODE,
    "load-format": "Omit it: safetensors and GGUF are recognized.",
    "model-loader-extra-config": _LAYOUT,
    "download-dir": "Set the variable HF_HOME.",
    "hf-token": "Set the variable HF_TOKEN.",
    "task": "Omit it: one server answers chat, completions and embeddings.",
    "runner": "Omit it: one server answers chat, completions and embeddings.",
    "convert": "Omit it: one server answers chat, completions and embeddings.",
    "chat-template": "Write the template to chat_template.jinja in the model's folder.",
    "chat-template-content-format": _LAYOUT,
    "response-role": "The role is always assistant: omit it.",
    "override-generation-config": "Send temperature, top_p and others in requests.",
    "enable-reasoning": "Omit it: --reasoning-parser and most chat templates turn it on.",
    "reasoning-parser-plugin": "--reasoning-parser lists the formats of reasoning that are read.",
    "enable-auto-tool-choice": f'{_ALWAYS} for requests with tools and tool_choice "auto".',
    "tool-parser-plugin": "--tool-format lists the formats of tool calls that are read.",
    "seed": "Send `seed` in requests.",
    "max-logprobs": _REQUESTS,
    "limit-mm-per-prompt": _MODALITIES,
    "mm-processor-kwargs": _MODALITIES,
    "allowed-local-media-path": _MODALITIES,
    "guided-decoding-backend": "Omit it: structured outputs are always on.",
    "structured-outputs-config": "Omit it: structured outputs are always on.",
    # Scheduling
    "enable-prefix-caching": f"{_ALWAYS}, for each tenant and adapter version.",
    "no-enable-prefix-caching": "Prefix caching cannot be turned off. Tenants never share a "
    "prefix: omit it.",
    "enable-chunked-prefill": f"{_ALWAYS}. --max-num-batched-tokens sets the tokens of a step.",
    "no-enable-chunked-prefill": "Prompts are always computed in chunks: omit it, and set "
    "--max-num-batched-tokens for longer ones.",
    "scheduling-policy": 'Omit it: requests have a "priority" and a "deadline_ms".',
    "preemption-mode": "Set --swap-gib to swap; without it preempted sequences are recomputed.",
    "num-scheduler-steps": "Set --async-scheduling.",
    "speculative-config": "Set --speculation, such as ngram or draft:MODEL.",
    "speculative-model": "Set --speculation draft:MODEL.",
    "num-speculative-tokens": "Set --max-draft-tokens.",
    # Devices and processes
    "data-parallel-size": _FLEET,
    "distributed-executor-backend": _FLEET,
    "api-server-count": "Start several servers with the same --database.",
    "compilation-config": "Omit it, or set --enforce-eager.",
    "max-seq-len-to-capture": _LAYOUT,
    "cuda-graph-sizes": _LAYOUT,
    "attention-backend": _LAYOUT,
    # HTTP
    "api-key": "Keys belong to tenants: `loraplex keys create --tenant SLUG`.",
    "ssl-ca-certs": f"Clients have no certificates. {_PROXY}",
    "ssl-cert-reqs": f"Clients have no certificates. {_PROXY}",
    "root-path": _PROXY,
    "allowed-origins": f"No CORS headers are sent. {_PROXY}",
    "allowed-methods": f"No CORS headers are sent. {_PROXY}",
    "allowed-headers": f"No CORS headers are sent. {_PROXY}",
    "allow-credentials": f"No CORS headers are sent. {_PROXY}",
    "middleware": _PROXY,
    # Logs
    "uvicorn-log-level": "Set --log-level.",
    "disable-uvicorn-access-log": "Omit it: no access log is written.",
    "enable-log-requests": "Prompts are never logged. `loraplex requests list` shows requests.",
    "disable-log-requests": "Omit it: prompts are never logged.",
    "disable-log-stats": "Omit it: figures are at /metrics, not in the log.",
    "otlp-traces-endpoint": "Set the variable OTEL_EXPORTER_OTLP_ENDPOINT.",
}
"""What to do instead of an option, by its name."""

SHORT: Mapping[str, str] = {
    "-tp": "Set --tensor-parallel-size.",
    "-pp": "Set --pipeline-parallel-size.",
    "-dp": _FLEET,
    "-q": "Set --quantize.",
    "-O": "Omit it, or set --enforce-eager.",
}

_AS_IT_IS = "A checkpoint in this format is served as it is: omit the option."
VALUES: Mapping[str, Mapping[str, str]] = {
    "quantization": {
        **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf"), _AS_IT_IS),
        **dict.fromkeys(("compressed-tensors", "modelopt"), _AS_IT_IS),
        "bitsandbytes": f"nf4 is its format of 4 bits. {_AS_IT_IS}",
    },
    "generation_config": {"vllm": "It is named none."},
    "kv_dtype": {
        "fp8_e4m3": "It is named fp8.",
        "fp8_e5m2": "fp8 is e4m3.",
        "bfloat16": "auto is the model's own dtype.",
    },
}
"""What to do instead of a value of an option, by the option's field."""


def explain_option(name: str) -> str | None:
    """What to do instead of this option of vLLM; None: it is no such option."""
    return OPTIONS.get(name)


def explain_foreign_options(arguments: Sequence[str]) -> str | None:
    """What to do instead of all such options on a command line; None without any."""
    explained = list(_explained(arguments))
    if not explained:
        return None
    if len(explained) == 1:
        return explained[0]
    return "\n  ".join(["Options of vLLM are on the command line:", *explained])


def _explained(arguments: Sequence[str]) -> Iterator[str]:
    for word in arguments:
        if word == "--":
            return
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if flag.startswith("--") and name in OPTIONS:
            yield f"{flag}: {OPTIONS[name]}"
        elif flag in SHORT:
            yield f"{flag}: {SHORT[flag]}"
