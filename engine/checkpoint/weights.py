"""Loads transformers' model from a base's folder and checks every weight against the files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    __version__,
)
from transformers.utils import logging as transformers_logging

from ..errors import (
    CompositeBase,
    DamagedBase,
    EngineError,
    ShapesDiffer,
    UnsupportedModel,
    WeightsMissing,
    WeightsUnexpected,
)
from ..gguf.file import GgufTensor
from .base_config import check_config, quantized, read_config_file
from .known_classes import give_known_classes
from .load_progress import report_progress
from .next_token_layer import NextTokenLayer
from .stored_experts import (
    ExpertsOf,
    ExpertsParameter,
    Stacking,
    StoredExperts,
    find_experts,
    leave_experts,
)
from .stored_tensors import spare_tensors
from .stored_weights import (
    AnyStoredWeight,
    Placeholder,
    StoredPackedWeight,
    StoredWeight,
    dense,
    format_of,
    leave_rows,
    leave_stored,
    placeholder,
    read_again,
    stored_weights,
    unconverted,
)
from .text_part import is_composite, text_settings

ModulesOf = Callable[[PreTrainedModel], Mapping[str, nn.Module]]
"""Chooses modules of a model, by their paths."""
_SCALE = re.compile(r"scale[^.]*$", re.IGNORECASE)
_MAX_REASON_CHARACTERS = 300


def load_config(model_dir: Path) -> Any:
    """The configuration in this folder, or this file, as its model's class reads it.

    Raises a subclass of UnsupportedModel if there is no causal language model for it.
    """
    content = read_config_file(model_dir)
    check_config(content, model_dir)
    model_type = content["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{model_dir}: transformers {__version__} has no model type {model_type}, and a "
            "model's own code is not run; give a model of another type"
        )
    with _faults_told(f"{model_dir}: config.json does not fit its model type {model_type}"):
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        if is_composite(content):
            whole, kind = config, type(config.get_text_config())
            config = kind.from_dict(text_settings(content))
            if hasattr(whole, "tie_word_embeddings"):  # the head is the whole model's
                config.tie_word_embeddings = whole.tie_word_embeddings
    if config.get_text_config() is not config:
        raise CompositeBase(
            f"{model_dir}: {model_type} is a composite model without a text_config: give the text "
            "model alone"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{model_dir}: {config.model_type} is not a causal language model")
    # The weights are unpacked here: transformers must load the model as if they were dense.
    config.__dict__.pop("quantization_config", None)
    return config


def build_model(config: Any) -> PreTrainedModel:
    """The model of this configuration, its weights not initialized where torch's device is meta.

    Raises UnsupportedModel if the class cannot be built from it.
    """
    with _faults_told(f"config.json does not fit its model type {config.model_type}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
    give_known_classes(model)
    return model


def load_weights(
    model_dir: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kind: type[PreTrainedModel] | None = None,
    left_stored: ModulesOf | None = None,
    left_experts: ExpertsOf | None = None,
    left_rows: ModulesOf | None = None,
    packed_later: ModulesOf | None = None,
    layer: NextTokenLayer | None = None,
) -> PreTrainedModel:
    """The model with the weights of the folder's files, every one and no other.

    `kind`: the class of which `build_model` has made a model of `config`; None: it was not called.
    `layer`: the model of this layer is loaded, with `config` its own; None: the folder's own model.
    `left_stored` chooses modules whose weights are read from the files only when they are used (see
    `stored_weights`), `left_experts` experts whose matrices are (see `stored_experts`).
    `left_rows` chooses modules of whose weights `row_reader` reads rows (see `leave_rows`).
    `packed_later` chooses modules that are loaded dense, and whose quantized weights
    `weight_values` reads again. Raises WeightsMissing, WeightsUnexpected, ShapesDiffer,
    QuantizedBase or DamagedBase.
    """
    if kind is None:
        with torch.device("meta"):
            kind = type(build_model(config))  # the fault is the configuration's, not the weights'
    loader = _Loader(kind, model_dir, config, dtype)
    with (
        transformers_quiet(),
        _faults_told(f"{model_dir}: its weights cannot be loaded", DamagedBase),
    ):
        stored = stored_weights(model_dir)
        if layer is not None:
            stored = layer.weights(stored)
        left = loader.find(stored, left_stored, left_experts, left_rows, packed_later)
        model = loader.read(stored, left=left.names)
    for name, tensor in left.modules.items():
        leave_stored(model.get_submodule(name), stored[tensor], dtype=dtype, device=device)
    for name, tensor in left.rows.items():
        leave_rows(model.get_submodule(name), stored[tensor], dtype=dtype, device=device)
    for name, tensor in left.packed_later.items():
        if format_of(stored[tensor]) is not None:
            read_again(model.get_submodule(name), stored[tensor], dtype=dtype, device=device)
    leave_experts(model, left.experts, dtype=dtype, device=device)
    model.requires_grad_(False)
    model.eval()._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model


class EmptyModel(NamedTuple):
    """A model whose weights have no values."""

    model: PreTrainedModel
    stored_names: dict[str, str]
    """Module path to the stored tensor that is its weight as it is; see `unconverted`."""
    stacking: Stacking
    """What the loader made of the stored tensors."""


def empty_model(model_dir: Path, config: Any, dtype: torch.dtype) -> EmptyModel:
    """The model that `load_weights` would load, from the headers of the folder's files.

    Raises as `load_weights` does for everything but values.
    """
    with torch.device("meta"):
        loader = _Loader(type(build_model(config)), model_dir, config, dtype)
    with (
        transformers_quiet(),
        _faults_told(f"{model_dir}: its weights cannot be loaded", DamagedBase),
    ):
        model, placeholders, stacking = loader.fill_empty(stored_weights(model_dir))
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    return EmptyModel(model, unconverted(modules, placeholders), stacking)


class _Found(NamedTuple):
    """What the files hold as the model has it: what stays there, and what is read again."""

    modules: dict[str, str]
    """The modules whose weights the files hold as they are, each with its stored tensor's name."""
    experts: dict[ExpertsParameter, StoredExperts]
    rows: dict[str, str]
    """Like `modules`, of which rows are read."""
    packed_later: dict[str, str]
    """Like `modules`, but read now, and again to be packed."""

    @property
    def names(self) -> frozenset[str]:
        """Of the stored tensors that are not read now."""
        of_experts = (name for experts in self.experts.values() for name in experts.names)
        return frozenset((*self.modules.values(), *self.rows.values(), *of_experts))


class _Loader(NamedTuple):
    """Fills a class of transformers with a folder's tensors, which it renames, merges and ties.

    Raises as `load_weights` does.
    """

    kind: type[PreTrainedModel]
    model_dir: Path
    config: Any
    dtype: torch.dtype

    def find(
        self,
        stored: Mapping[str, AnyStoredWeight],
        modules_of: ModulesOf | None,
        experts_of: ExpertsOf | None,
        rows_of: ModulesOf | None,
        later_of: ModulesOf | None,
    ) -> _Found:
        """What of the chosen parts the files hold as it is. No values are read."""
        chosen = (modules_of, rows_of, later_of)
        if experts_of is None and not any(chosen):
            return _Found({}, {}, {}, {})
        model, placeholders, stacking = self.fill_empty(stored)
        modules, rows, later = (
            unconverted(choose(model), placeholders) if choose else {} for choose in chosen
        )
        experts = experts_of(model) if experts_of else ()
        return _Found(modules, find_experts(model, experts, stacking, stored), rows, later)

    def fill_empty(
        self, stored: Mapping[str, AnyStoredWeight]
    ) -> tuple[PreTrainedModel, dict[str, Placeholder], Stacking]:
        """The model of placeholders, these by the names of their stored tensors, and what was made
        of them."""
        placeholders = {name: placeholder(weight, self.dtype) for name, weight in stored.items()}
        stacking = Stacking(placeholders)
        with stacking:
            model = self._fill(placeholders)
        return model, placeholders, stacking

    def read(
        self, stored: Mapping[str, AnyStoredWeight], *, left: Collection[str]
    ) -> PreTrainedModel:
        """The model with the values of all stored tensors but those in `left`."""
        read = {name: weight for name, weight in stored.items() if name not in left}
        with ExitStack() as files, report_progress("reading weights", len(read)) as advance:
            plain = {n: weight for n, weight in read.items() if isinstance(weight, StoredWeight)}
            opened = {
                path: files.enter_context(safe_open(path, framework="pt", backend="pread"))
                for path in {weight.path for weight in plain.values()}
            }
            tensors: dict[str, Any] = {
                name: _LazyTensor(opened[weight.path].get_slice(weight.name), advance)
                for name, weight in plain.items()
            }
            for name, weight in read.items():
                if not isinstance(weight, StoredWeight):
                    tensors[name] = _LazyDense(weight, self.dtype, advance)
            tensors |= {name: placeholder(stored[name], self.dtype) for name in left}
            return self._fill(tensors)

    def _fill(self, tensors: Mapping[str, Any]) -> PreTrainedModel:
        model, info = self.kind.from_pretrained(
            None,
            config=self.config,
            state_dict=tensors,
            dtype=self.dtype,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
        _check_loaded(model, info, self.model_dir)
        give_known_classes(model)
        return model


class _LazyTensor:
    """A tensor for transformers' loader, which reads it with `tensor[...]`.

    Into memory of its own: of a mapped file, all pages that were read would stay until its end.
    """

    def __init__(self, part: Any, advance: Callable[[], None]) -> None:
        self._part = part
        self._advance = advance

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._part[index]
        self._advance()
        return tensor


class _LazyDense:
    """A quantized weight for transformers' loader, which may merge it with others: made dense."""

    def __init__(
        self,
        weight: StoredPackedWeight | GgufTensor,
        dtype: torch.dtype,
        advance: Callable[[], None],
    ) -> None:
        self._weight = weight
        self._dtype = dtype
        self._advance = advance

    def __getitem__(self, index: Any) -> Tensor:
        tensor = dense(self._weight.read(), dtype=self._dtype, device=torch.device("cpu"))[index]
        self._advance()
        return tensor


def _check_loaded(model: PreTrainedModel, info: Mapping[str, Any], model_dir: Path) -> None:
    """Refuse tensors that transformers would initialize randomly or ignore."""
    is_spare = spare_tensors(text_settings(read_config_file(model_dir)))
    unexpected = [name for name in info["unexpected_keys"] if not is_spare.search(name)]
    scales = [name for name in unexpected if _SCALE.search(name)]
    if scales:
        raise quantized(model_dir, f"{min(scales)} is a scale that the model does not have")
    kind = type(model).__name__
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, declared = mismatched[0]
        raise ShapesDiffer(
            f"{model_dir}: {name} is {list(stored)} in the files and {list(declared)} by "
            "config.json: give the config.json and the weights of one model"
        )
    if info["missing_keys"]:
        extra = f"; not of this model: {_listed(unexpected)}" if unexpected else ""
        raise WeightsMissing(
            f"{model_dir}: its files lack {_listed(info['missing_keys'])} of {kind}{extra}: "
            "download it again, or save the whole model"
        )
    if unexpected:
        raise WeightsUnexpected(
            f"{model_dir}: {kind} does not use {_listed(unexpected)} in its files: "
            "give the config.json and the weights of one model"
        )


def _listed(names: Collection[str]) -> str:
    others = len(names) - 1
    more = f" and {others} more tensor{'s' if others > 1 else ''}" if others else ""
    return f"{min(names)}{more}"


@contextmanager
def _faults_told(what: str, kind: type[UnsupportedModel] = UnsupportedModel) -> Iterator[None]:
    """Convert any error of transformers for a wrong file to `kind`, in one line."""
    try:
        yield
    except (EngineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # libraries raise all kinds for a damaged file
        text = " ".join(str(exc).split())[:_MAX_REASON_CHARACTERS]
        raise kind(f"{what}: {type(exc).__name__}: {text}") from exc


@contextmanager
def transformers_quiet() -> Iterator[None]:
    """Suppress transformers' report of mismatches, as Loraplex's errors name them, its progress
    bar, and its advice to install kernels that Loraplex does not use."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()
