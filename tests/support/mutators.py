"""Mutators that damage an adapter, each with a name and a seed.

A mutator gets a valid adapter and returns another one, usually broken; some are harmless, and a few
depend on the random choice. `reference_validator` decides which is which.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from support.safetensors_files import make_file

PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterFiles:
    """The two files of an adapter."""

    config: bytes
    weights: bytes

    @property
    def header(self) -> dict[str, Any]:
        """The tensors' entries of a file that is well formed, without its metadata."""
        header: dict[str, Any] = json.loads(self.weights[8 : self.payload_offset])
        header.pop("__metadata__", None)
        return header

    @property
    def payload_offset(self) -> int:
        return 8 + int.from_bytes(self.weights[:8], "little")

    @property
    def payload(self) -> bytes:
        return self.weights[self.payload_offset :]

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.config)
        return fields

    def with_fields(self, **changes: Any) -> AdapterFiles:
        return replace(self, config=json.dumps({**self.fields, **changes}).encode())

    def with_header(
        self, header: bytes | Mapping[str, Any], payload: bytes | None = None
    ) -> AdapterFiles:
        return replace(
            self, weights=make_file(header, self.payload if payload is None else payload)
        )


Mutator = Callable[[AdapterFiles, random.Random], AdapterFiles]

MUTATORS: dict[str, Mutator] = {}


def _mutator(function: Mutator) -> Mutator:
    MUTATORS[function.__name__] = function
    return function


def mutated(
    valid: AdapterFiles, count: int, seed: int = 0, *, label: str = "adapter"
) -> Iterator[tuple[str, AdapterFiles]]:
    """`count` adapters, each mutator in turn with ever new draws, named for a failure's message.

    `label` tells the draws of one adapter from those of another; the first mutator depends on it.
    """
    names = list(MUTATORS)
    first = random.Random(label).randrange(len(names))
    for number in range(count):
        name = names[(first + number) % len(names)]
        drawn = random.Random(f"{label} {seed} {number} {name}")
        yield f"{label} {name}#{number}", MUTATORS[name](valid, drawn)


# --- whole files ----------------------------------------------------------------------------------


@_mutator
def truncate_anywhere(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, weights=files.weights[: draw.randrange(len(files.weights))])


@_mutator
def truncate_payload(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, weights=files.weights[: -draw.randint(1, 64)])


@_mutator
def append_bytes(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, weights=files.weights + draw.randbytes(draw.randint(1, 300)))


@_mutator
def flip_bits(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    weights = bytearray(files.weights)
    for _ in range(draw.randint(1, 8)):
        weights[draw.randrange(len(weights))] ^= 1 << draw.randrange(8)
    return replace(files, weights=bytes(weights))


@_mutator
def flip_bits_of_the_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    weights = bytearray(files.weights)
    for _ in range(draw.randint(1, 3)):
        weights[draw.randrange(files.payload_offset)] ^= 1 << draw.randrange(8)
    return replace(files, weights=bytes(weights))


@_mutator
def empty_file(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, weights=bytes(draw.randint(1, 9)))


@_mutator
def pickle_file(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    program = b"}q\x00(X\x03\x00\x00\x00cmdcos\nsystem\n" + draw.randbytes(200)
    return replace(files, weights=bytes([0x80, draw.randint(2, 5)]) + program)


@_mutator
def zip_archive(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        member = zipfile.ZipInfo("archive/data.pkl")  # a plain name would be dated now
        file.writestr(member, draw.randbytes(100))
    return replace(files, weights=archive.getvalue())


@_mutator
def other_format(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    start = draw.choice(
        [
            b"GGUF\x03\x00\x00\x00" + bytes(8),
            b"<!DOCTYPE html><html>404</html>",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64,
            b'{"error": "access denied"}',
            b"\x7fELF\x02\x01\x01" + bytes(9),
            b"\x89HDF\r\n\x1a\n",
            gzip.compress(files.weights, mtime=0),
        ]
    )
    return replace(files, weights=start + draw.randbytes(50))


@_mutator
def random_bytes(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, weights=draw.randbytes(draw.randint(8, 4000)))


@_mutator
def swapped_files(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    if draw.random() < 0.5:
        return replace(files, weights=files.config)
    return replace(files, config=files.weights)


# --- the header as text ---------------------------------------------------------------------------


@_mutator
def lying_header_length(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    true = files.payload_offset - 8
    length = draw.choice([0, 1, true - 1, true + 1, true + 8, 1 << 22, 1 << 32, (1 << 64) - 1])
    return replace(files, weights=length.to_bytes(8, "little") + files.weights[8:])


@_mutator
def no_object_as_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return files.with_header(draw.choice([b"[]", b"null", b'"x"', b"7", b"", b"{}", b"true"]))


@_mutator
def nested_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    bracket = draw.choice([b"[", b'{"a":'])
    return files.with_header(b'{"a":' + bracket * draw.choice([500, 5_000, 100_000]))


@_mutator
def huge_number_in_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    number = b"9" * draw.choice([19, 25, 4_000, 50_000])
    shape = b'"shape":[%s,1]' % number
    return files.with_header(b'{"a":{"dtype":"F32",%s,"data_offsets":[0,4]}}' % shape)


@_mutator
def no_number_in_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    value = draw.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x10", b"01", b"1_0"])
    offsets = b'"data_offsets":[0,%s]' % value
    return files.with_header(b'{"a":{"dtype":"F32","shape":[1],%s}}' % offsets)


@_mutator
def bytes_that_are_no_utf8(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    text = json.dumps(files.header).encode()
    at = draw.randrange(1, len(text))
    return files.with_header(
        text[:at] + draw.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80"]) + text[at:]
    )


@_mutator
def bytes_around_the_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    text = json.dumps(files.header).encode()
    before, after = draw.choice(
        [
            (b"\xef\xbb\xbf", b""),
            (b" ", b""),
            (b"", b"x"),
            (b"", b"{}"),
            (b"", b"   "),
            (b"", b"\0"),
        ]
    )
    return files.with_header(before + text + after)


@_mutator
def duplicate_tensor(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    name = draw.choice(_names(files))
    text = json.dumps(files.header)
    again = json.dumps({name: files.header[name]})
    return files.with_header((text[:-1] + "," + again[1:]).encode())


@_mutator
def duplicate_entry_field(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    field = draw.choice(["dtype", "shape", "data_offsets"])
    entry = json.dumps(files.header[_names(files)[0]])
    value = json.dumps(files.header[_names(files)[0]][field])
    doubled = f'{entry[:-1]}, "{field}": {value}}}'
    return files.with_header(json.dumps(files.header).replace(entry, doubled, 1).encode())


@_mutator
def very_many_tensors(files: AdapterFiles, _draw: random.Random) -> AdapterFiles:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return files.with_header({f"t{number}": entry for number in range(100_001)}, b"")


@_mutator
def huge_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    padding = b" " * draw.choice([(16 << 20) + 1, 17 << 20])
    return files.with_header(json.dumps(files.header).encode() + padding)


# --- metadata and entries -------------------------------------------------------------------------


@_mutator
def odd_metadata(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    metadata = draw.choice(
        [
            *([], "pt", 7, {"a": 1}, {"a": {"b": "c"}}, {"a": None}),
            *({"format": "pt"}, {"\x1b[2J": "\r\nERROR forged"}, {}),  # harmless
        ]
    )
    return files.with_header({"__metadata__": metadata, **files.header})


@_mutator
def entry_that_is_none(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    entry: Any = draw.choice([None, [], 1, "F32", {}, {"dtype": "F32"}, {"shape": [1]}])
    return _with_entry(files, draw, lambda _: entry)


@_mutator
def entry_with_another_field(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    field = draw.choice(["stride", "__class__", "", "offset", "\u202e"])
    return _with_entry(files, draw, lambda entry: {**entry, field: 1})


@_mutator
def entry_without_a_field(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    gone = draw.choice(["dtype", "shape", "data_offsets"])
    return _with_entry(
        files, draw, lambda entry: {key: value for key, value in entry.items() if key != gone}
    )


@_mutator
def odd_dtype(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    kinds = ["I8", "U8", "I64", "F64", "F8_E4M3", "F8_E5M2", "BOOL", "C64", "F4", "f32", "float32"]
    dtype = draw.choice([*kinds, "", "\x1b[31m", "x" * 5000, 4, None, ["F32"], {"F32": 1}])
    return _with_entry(files, draw, lambda entry: {**entry, "dtype": dtype})


@_mutator
def dtype_of_another_size(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    dtype = draw.choice(["F16", "BF16"])
    return _with_entry(files, draw, lambda entry: {**entry, "dtype": dtype})


@_mutator
def odd_shape(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    shape: Any = draw.choice(
        [
            *("16", None, {}, [True, 16], [2.0, 8], ["2", "8"], [[2, 8]], [-2, -8], [None], 16),
            *([], [0, 1 << 40], [2, 8, 1], [1] * 100_000, [1 << 32, 1 << 32], [1 << 63, 2], [15]),
        ]
    )
    return _with_entry(files, draw, lambda entry: {**entry, "shape": shape})


@_mutator
def transposed_shape(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return _with_entry(files, draw, lambda entry: {**entry, "shape": entry["shape"][::-1]})


@_mutator
def flat_shape(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return _with_entry(files, draw, lambda entry: {**entry, "shape": [math.prod(entry["shape"])]})


@_mutator
def odd_offsets(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    offsets = draw.choice(
        [
            *(None, "0", [], [0], [0, 1, 2], {"0": 1}, [0.0, 64.0], ["0", "64"], [True, 64]),
            *([-64, 0], [64, 0], [0, 1 << 63], [1 << 64, (1 << 64) + 64], [0, 10**30], [1, 65]),
        ]
    )
    return _with_entry(files, draw, lambda entry: {**entry, "data_offsets": offsets})


@_mutator
def shifted_offsets(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    by = draw.choice([-8, -4, -1, 1, 4, 8, 1000])
    return _with_entry(
        files,
        draw,
        lambda entry: {**entry, "data_offsets": [n + by for n in entry["data_offsets"]]},
    )


@_mutator
def two_tensors_in_one_place(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    header = files.header
    one, other = draw.sample(_names(files), 2)
    header[other]["data_offsets"] = header[one]["data_offsets"]
    return files.with_header(header)


@_mutator
def exchanged_offsets(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Harmless where the sizes agree: the tensors exchange their values."""
    header = files.header
    one, other = draw.sample(_names(files), 2)
    first, second = header[one]["data_offsets"], header[other]["data_offsets"]
    header[one]["data_offsets"], header[other]["data_offsets"] = second, first
    return files.with_header(header)


@_mutator
def hole_between_tensors(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    header, gap = files.header, draw.choice([1, 4, 64])
    at = draw.choice([entry["data_offsets"][0] for entry in header.values()])
    for entry in header.values():
        entry["data_offsets"] = [
            n + gap * (entry["data_offsets"][0] >= at) for n in entry["data_offsets"]
        ]
    return files.with_header(header, files.payload[:at] + bytes(gap) + files.payload[at:])


@_mutator
def other_order_in_header(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Harmless: names, not positions, decide."""
    entries = list(files.header.items())
    draw.shuffle(entries)
    return files.with_header(dict(entries))


# --- names ----------------------------------------------------------------------------------------


@_mutator
def hostile_name(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    name = draw.choice(
        [
            *(
                "../../etc/passwd",
                "/etc/passwd",
                "a/b",
                "C:\\x",
                "\x1b[2J\x1b[31mroot",
                "a\nb",
                "a\rb",
            ),
            *(
                "a\0b",
                "",
                " ",
                "x" * 257,
                "x" * 100_000,
                "ｂase",
                "é",
                "\u202eabc",
                "\u2028",
                "🤗",
                "%s%n",
            ),
            *("${jndi:ldap://x}", "'; DROP TABLE adapters; --", "<script>", "{}", "[0]"),
        ]
    )
    return _renamed(files, draw.choice(_names(files)), name)


@_mutator
def special_name(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    name = draw.choice(["__class__", "..", ".", "-", "con", "__proto__", "weight", "..weight"])
    return _renamed(files, draw.choice(_names(files)), name)


@_mutator
def other_prefix(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    prefix = draw.choice(
        ["", "model.", "base_model.", PREFIX + "model.", PREFIX + PREFIX, "module."]
    )
    header = {prefix + name.removeprefix(PREFIX): entry for name, entry in files.header.items()}
    return files.with_header(header)


@_mutator
def other_suffix(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    name = draw.choice(_names(files))
    suffix = draw.choice([".default.weight", "", ".weight.weight", ".bias_", ".Weight", ".w", "."])
    return _renamed(files, name, name.removesuffix(".weight") + suffix)


@_mutator
def other_case(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    name = draw.choice(_names(files))
    return _renamed(files, name, draw.choice([name.upper(), name.swapcase(), name.title()]))


@_mutator
def module_that_is_not_there(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    module = draw.choice(
        ["x_proj", "layers.999.q_proj", "q_proj.q_proj", "q_pro", ".q_proj", "q_proj."]
    )
    name = draw.choice(_names(files))
    return _renamed(files, name, f"{PREFIX}{module}.{name.split('.', 3)[-1]}")


@_mutator
def one_matrix_of_a_pair(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    header = files.header
    last = max(header, key=lambda name: int(header[name]["data_offsets"][0]))
    begin = header.pop(last)["data_offsets"][0]
    return files.with_header(header, files.payload[:begin])


@_mutator
def surplus_tensor(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    end = len(files.payload)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    name = draw.choice(
        ["optimizer.state", "step", f"{PREFIX}q_proj.weight", f"{PREFIX}q_proj.alpha"]
    )
    return files.with_header({**files.header, name: entry}, files.payload + bytes(4))


# --- values ---------------------------------------------------------------------------------------


@_mutator
def values_that_are_not_finite(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return _with_value(files, draw, draw.choice([np.nan, np.inf, -np.inf]))


@_mutator
def odd_values(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Harmless in float32, which is served here."""
    return _with_value(files, draw, draw.choice([1e-45, -1e-38, 0.0, -0.0, 65504.0, 1e20, -1e30]))


@_mutator
def values_beyond_the_range(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Of B, whose scale then takes them beyond; of A it does not."""
    return _with_value(files, draw, draw.choice([3.4e38, -3.4e38, 2e38]))


@_mutator
def zeroed_matrices(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    which = draw.choice(["lora_A", "lora_B", "lora_"])
    payload = bytearray(files.payload)
    for name, entry in files.header.items():
        if which in name:
            begin, end = entry["data_offsets"]
            payload[begin:end] = bytes(end - begin)
    return files.with_header(files.header, bytes(payload))


@_mutator
def random_payload(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return files.with_header(files.header, draw.randbytes(len(files.payload)))


@_mutator
def empty_tensors(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    entry = {"dtype": "F32", "shape": draw.choice([[0], [0, 8], [2, 0]]), "data_offsets": [0, 0]}
    return files.with_header(dict.fromkeys(files.header, entry), b"")


# --- the configuration as text --------------------------------------------------------------------


@_mutator
def truncated_config(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return replace(files, config=files.config[: draw.randrange(len(files.config))])


@_mutator
def flipped_config_bits(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    config = bytearray(files.config)
    config[draw.randrange(len(config))] ^= 1 << draw.randrange(8)
    return replace(files, config=bytes(config))


@_mutator
def no_object_as_config(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    config = draw.choice(
        [b"", b"[]", b"null", b"7", b'"LORA"', b"{}", b"{'r': 2}", b"r: 2\n", b"{,}"]
    )
    return replace(files, config=config)


@_mutator
def config_in_another_encoding(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    encoding = draw.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le"])
    return replace(files, config=files.config.decode().encode(encoding))


@_mutator
def nested_config(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    start = draw.choice(
        ['{"r":' + "[" * 100_000, '{"r":' * 50_000, '{"rank_pattern":{"a":' + "[" * 9_999]
    )
    return replace(files, config=start.encode())


@_mutator
def duplicate_config_key(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    doubled = draw.choice(
        ['"r": 2', '"lora_alpha": 64', '"use_rslora": true', '"peft_type": "LORA"']
    )
    return replace(
        files, config=files.config.replace(b"{", f"{{{doubled}, {doubled}, ".encode(), 1)
    )


@_mutator
def huge_config(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    padding = draw.choice([b" " * (1 << 20), b" " * (3 << 20)])
    return replace(files, config=files.config + padding)


# --- the configuration's fields -------------------------------------------------------------------

_ODD_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1.5, 3, 4097, 10**30, "2", "", True, None, [2], {"a": 2}, 2.0),
)


@_mutator
def odd_rank(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    return files.with_fields(r=draw.choice(_ODD_NUMBERS))


@_mutator
def odd_alpha(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Whole and fractional ones above 0 are harmless."""
    return files.with_fields(lora_alpha=draw.choice([*_ODD_NUMBERS, 1e7, -0.0, 1e-300]))


@_mutator
def numbers_that_are_none(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    field = draw.choice(["r", "lora_alpha"])
    number = draw.choice(["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "0x10", "1_0"])
    text = json.dumps({**files.fields, field: "@"}).replace('"@"', number)
    return replace(files, config=text.encode())


@_mutator
def odd_rank_pattern(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    pattern = draw.choice(
        [
            *([], "q_proj", 7, {"q_proj": 3}, {"q_proj": 0}, {"q_proj": "2"}, {"q_proj": None}),
            *({"q_proj": 2}, {"": 2}, {"(a+)+$": 2}, {"q_proj|v_proj": 2}, {"^q_proj": 2}),
            *({"x" * 5000: 2}, {"\x1b[2J": 2}, {f"m{n}": 2 for n in range(5000)}, {"q.proj": 2}),
        ]
    )
    return files.with_fields(rank_pattern=pattern)


@_mutator
def odd_alpha_pattern(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    pattern = draw.choice(
        [
            *([], "v_proj", {"v_proj": 0}, {"v_proj": -1}, {"v_proj": "8"}, {"v_proj": [8]}),
            *(
                {"v_proj": 8},
                {"proj": 8},
                {".*": 8},
                {"(.*)*": 8},
                {"^v_proj": 0.5},
                {"v_proj$": 8},
            ),
            *({"../v_proj": 8}, {"v_proj": 1e9}, {"v_proj": True}, {"_proj": 3}, {"..proj": 3}),
        ]
    )
    return files.with_fields(alpha_pattern=pattern)


@_mutator
def pattern_as_targets(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Harmless as a text: it is not run, the tensors' names decide."""
    targets = draw.choice(
        [
            "([a-z0-9_.]+)+X",
            "(a|a)*$",
            ".*",
            "(",
            "all-linear",
            7,
            [1],
            [["q_proj"]],
            {"q_proj": 1},
            True,
        ]
    )
    return files.with_fields(target_modules=targets)


@_mutator
def unknown_field(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Harmless if it is not set."""
    name = draw.choice(["future_feature", "__class__", "r ", "R", "\x1b[2J", "x" * 1000, ""])
    return files.with_fields(
        **{name: draw.choice([1, "on", True, [1], {"a": 1}, 0.5, False, None, ""])}
    )


@_mutator
def code_reference(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    field, value = draw.choice(
        [
            ("auto_map", {"AutoModel": "evil--modeling.Model"}),
            ("auto_mapping", {"base_model_class": "os", "parent_library": "os"}),
            ("megatron_core", "os"),
            ("megatron_config", {"a": 1}),
            ("runtime_config", {"ephemeral_gpu_offload": True}),
            ("custom_modules", {"a": "b"}),
        ]
    )
    return files.with_fields(**{field: value})


@_mutator
def other_peft_type(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    kinds = ["PROMPT_TUNING", "PREFIX_TUNING", "IA3", "LOHA", "VERA", "lora", "", None, 1, ["LORA"]]
    return files.with_fields(peft_type=draw.choice(kinds))


@_mutator
def other_task(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Without one it is harmless."""
    return files.with_fields(
        task_type=draw.choice(["SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", 1, [], "\r\n", None])
    )


@_mutator
def invocation(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """A proper one is harmless."""
    tokens: object = draw.choice(
        [[1, 2], [3], None, [], [-1], [True], [1.5], "1", {}, [1 << 70], [0] * 257]
    )
    return files.with_fields(alora_invocation_tokens=tokens)


@_mutator
def feature_that_needs_a_merge(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    field, value = draw.choice(
        [
            ("layer_replication", [[0, 1], [0, 1]]),
            ("arrow_config", {"top_k": 1}),
            ("kasa_config", {"a": 1}),
            ("init_lora_weights", "pissa"),
            ("init_lora_weights", "olora"),
            ("init_lora_weights", 3),
        ]
    )
    return files.with_fields(**{field: value})


@_mutator
def flag_of_another_type(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """Not set, or set right, it is harmless."""
    return files.with_fields(use_rslora=draw.choice([1, "true", [], {}, None, False, True, 0.0]))


@_mutator
def two_mutations(files: AdapterFiles, draw: random.Random) -> AdapterFiles:
    """One of the values or names, one of the configuration."""
    first = draw.choice([odd_values, other_order_in_header, hostile_name, flip_bits, odd_metadata])
    second = draw.choice([odd_alpha, odd_rank_pattern, unknown_field, other_task, odd_rank])
    return second(first(files, draw), draw)


# --- helpers --------------------------------------------------------------------------------------


def _names(files: AdapterFiles) -> list[str]:
    return list(files.header)


def _with_entry(
    files: AdapterFiles, draw: random.Random, change: Callable[[dict[str, Any]], object]
) -> AdapterFiles:
    name = draw.choice(_names(files))
    header = files.header
    return files.with_header({**header, name: change(header[name])})


def _renamed(files: AdapterFiles, old: str, new: str) -> AdapterFiles:
    header = {new if name == old else name: entry for name, entry in files.header.items()}
    return files.with_header(header)


def _with_value(files: AdapterFiles, draw: random.Random, value: float) -> AdapterFiles:
    payload = np.frombuffer(files.payload, "<f4").copy()
    payload[draw.randrange(len(payload))] = value
    return files.with_header(files.header, payload.tobytes())
