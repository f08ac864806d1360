"""Cached prefixes go to the disk, and come back to whom they belong, also after a restart."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.kv import prefix_file
from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.kv.prefix_file import PrefixFile
from loraplex.engine.messages import DeleteAdapter
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.families import SERVED, STATES, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter

BLOCK = 16
NUM_BLOCKS = 12
BLOCK_BYTES = 8192
"""Of the tiny base, in fp32."""
SWAP_BYTES = 16 * BLOCK_BYTES
KEY = bytes(range(32))
PROMPT = [3 * index % 251 for index in range(4 * BLOCK + 5)]


@pytest.fixture(autouse=True)
def _free_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and reads pay, whatever was measured."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)
    monkeypatch.setattr(StepCosts, "read_seconds", lambda *_: 0.0)
    monkeypatch.setattr(StepCosts, "recompute_seconds", lambda *_: 60.0)


@pytest.fixture(scope="module")
def adapter_folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r, scale=0.1) for r in (3, 8)]


def make_engine(base: Path, tmp_path: Path, **config: object) -> LocalEngine:
    settings = {
        "kv_cache_bytes": NUM_BLOCKS * BLOCK_BYTES,
        "swap_bytes": SWAP_BYTES,
        "prefix_disk_bytes": 1 << 20,
        "prefix_disk_dir": str(tmp_path / "prefixes"),
        "prefix_key": KEY,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        **config,
    }
    return LocalEngine(base, tmp_path, **settings)


def restarted(engine: LocalEngine, base: Path, tmp_path: Path, **config: object) -> LocalEngine:
    """Another engine on the same folder."""
    engine.close()
    return make_engine(base, tmp_path, **config)


def ask(
    engine: LocalEngine,
    prompt: list[int],
    adapter: AdapterKey | None = None,
    tenant_id: str = "acme",
    *,
    max_tokens: int = 6,
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    name = engine.submit(
        prompt, adapter, tenant_id=tenant_id, max_tokens=max_tokens, ignore_eos=True
    )
    engine.run()
    answer = engine.answers[name]
    assert answer.started is not None
    return answer.token_ids, answer.started.num_cached_tokens


def displace(engine: LocalEngine, tenants: Sequence[str] = ("x", "y", "z")) -> None:
    """Fill device and host with others' prompts."""
    rng = random.Random(0)
    for number in range(10):
        prompt = rng.choices(range(256), k=5 * BLOCK)
        ask(engine, prompt, tenant_id=tenants[number % len(tenants)], max_tokens=1)


def num_from_disk(engine: LocalEngine) -> int:
    return engine.core.stats().num_blocks_from_disk


def contents(tmp_path: Path) -> bytes:
    """Everything in the tier's folder."""
    paths = sorted((tmp_path / "prefixes").rglob("*"))
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def test_a_prefix_that_left_device_and_host_comes_back_and_gives_the_same_tokens(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, num_cached = ask(engine, PROMPT)
    assert num_cached == 0
    displace(engine)
    second, num_cached = ask(engine, PROMPT)
    assert num_cached == 4 * BLOCK
    assert num_from_disk(engine) == 4
    assert second == first
    third, num_cached = ask(engine, PROMPT)
    assert (third, num_cached) == (first, 4 * BLOCK)
    assert num_from_disk(engine) == 4, "it was on the device"
    stats = engine.core.stats()
    assert 0 < stats.disk_prefix_bytes <= stats.disk_prefix_capacity_bytes <= 1 << 20
    assert stats.num_disk_misreads == stats.num_disks_off == 0
    assert stats.bytes_from_disk == 4 * BLOCK_BYTES
    assert stats.bytes_to_disk == stats.num_blocks_to_disk * BLOCK_BYTES > 0
    assert stats.num_disk_cached_tokens == 4 * BLOCK
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks, "blocks leaked"
    engine.core.parts.kv.check_integrity([])
    engine.close()


def test_a_restarted_engine_has_the_prefixes_of_the_one_before(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """Also what had never left the device."""
    engine = make_engine(tiny_base, tmp_path)
    adapter = engine.add_adapter(adapter_folders[0])
    expected = {key: ask(engine, PROMPT, key)[0] for key in (None, adapter)}
    engine = restarted(engine, tiny_base, tmp_path)
    assert engine.add_adapter(adapter_folders[0]) == adapter
    for key, tokens in expected.items():
        assert ask(engine, PROMPT, key) == (tokens, 4 * BLOCK)
    assert num_from_disk(engine) == 8
    engine.close()


@pytest.fixture(scope="module")
def written(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tier's folder after an engine has written PROMPT's prefix."""
    home = tmp_path_factory.mktemp("written")
    engine = make_engine(tiny_base, home)
    ask(engine, PROMPT)
    engine.close()
    return home / "prefixes"


@pytest.mark.parametrize(
    ("other", "num_cached"),
    [
        ({}, 4 * BLOCK),
        ({"prefix_key": bytes(32)}, 0),
        ({"prefix_key": None}, 0),
        ({"kv_dtype": "int8"}, 0),
        ({"kv_block_size": 32}, 0),
        ({"attention_window": 32}, 0),
        ({"prefix_disk_bytes": 1 << 19}, 0),
    ],
    ids=["the same", "another key", "no key", "KV dtype", "block size", "window", "size"],
)
def test_another_key_or_form_of_the_cache_finds_nothing(
    other: dict[str, object], num_cached: int, written: Path, tiny_base: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "prefixes")
    engine = make_engine(tiny_base, tmp_path, **other)
    assert ask(engine, PROMPT)[1] == num_cached
    assert engine.core.stats().disk_prefix_bytes > 0, "it writes its own"
    engine.close()


def test_no_other_tenant_or_adapter_finds_it(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """The same prompt, and the same adapter under another tenant."""
    engine = make_engine(tiny_base, tmp_path)
    own = engine.add_adapter(adapter_folders[0])
    ask(engine, PROMPT, own)
    engine = restarted(engine, tiny_base, tmp_path)
    own, sibling = (engine.add_adapter(folder) for folder in adapter_folders)
    foreign = engine.add_adapter(adapter_folders[0], "globex")
    for adapter, tenant_id in [(None, "acme"), (sibling, "acme"), (foreign, "globex")]:
        assert ask(engine, PROMPT, adapter, tenant_id)[1] == 0, (adapter, tenant_id)
    assert num_from_disk(engine) == 0
    assert ask(engine, PROMPT, own)[1] == 4 * BLOCK
    engine.close()


def test_what_is_on_disk_is_encrypted(tiny_base: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_base, tmp_path)
    ask(engine, PROMPT, tenant_id="tenant-in-clear")
    cache, group = engine.core.parts.runner.cache, engine.core.parts.kv.groups[0]
    block = next(iter(group.cached._prefixes))
    kv = cache._tensors[0][0][0, block].contiguous().numpy().tobytes()
    tokens = b"".join(token.to_bytes(4, "little") for token in PROMPT[:BLOCK])
    found = contents(tmp_path)
    assert len(found) > 100_000
    for secret in (kv[:64], tokens, b"tenant-in-clear", KEY):
        assert secret not in found
    engine.close()


def test_deleting_an_adapter_makes_its_prefixes_unreadable_before_the_receipt(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    deleted, kept = (engine.add_adapter(folder) for folder in adapter_folders)
    expected = {key: ask(engine, PROMPT, key)[0] for key in (deleted, kept)}
    keys = set((tmp_path / "prefixes").glob("*/keys/*.key"))
    old = {path: path.read_bytes() for path in keys}
    engine.core.handle(DeleteAdapter(deleted, 0.0))
    while deleted not in engine.evicted:
        engine.step()
    left = set((tmp_path / "prefixes").glob("*/keys/*.key"))
    assert len(left) == 1
    assert left < keys
    (gone,) = keys - left
    assert old[gone] not in contents(tmp_path)
    disk = engine.core.parts.kv.disk
    assert disk is not None
    assert {prefix.namespace.adapter for prefix in disk.slots[0].prefixes._prefixes.values()} == {
        kept
    }
    engine = restarted(engine, tiny_base, tmp_path)
    for folder in adapter_folders:
        engine.add_adapter(folder)
    assert ask(engine, PROMPT, deleted) == (expected[deleted], 0)
    assert ask(engine, PROMPT, kept) == (expected[kept], 4 * BLOCK)
    engine.close()


def test_an_adapter_that_is_pushed_again_is_written_anew(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    adapter = engine.add_adapter(adapter_folders[0])
    first, _ = ask(engine, PROMPT, adapter)
    engine.core.handle(DeleteAdapter(adapter, 0.0))
    engine.run()
    assert ask(engine, PROMPT, engine.add_adapter(adapter_folders[0])) == (first, 0)
    engine = restarted(engine, tiny_base, tmp_path)
    assert ask(engine, PROMPT, engine.add_adapter(adapter_folders[0])) == (first, 4 * BLOCK)
    engine.close()


def test_a_receipt_waits_until_the_disk_has_erased(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    adapter = engine.add_adapter(adapter_folders[0])
    ask(engine, PROMPT, adapter)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("loraplex.engine.kv.disk_store.erase_keys_of", fail)
    monkeypatch.setattr("loraplex.engine.kv.disk_store.RETRY_SECONDS", 0.01)
    engine.core.handle(DeleteAdapter(adapter, 0.0))
    for _ in range(300):
        engine.step()
    assert engine.evicted == []
    monkeypatch.undo()
    engine.run()
    assert engine.evicted == [adapter]
    assert not list((tmp_path / "prefixes").glob("*/keys/*.key"))
    engine.close()


def corrupt(tmp_path: Path, *, first: int, last: int | None) -> None:
    """Change a byte in every KiB of the file."""
    (path,) = (tmp_path / "prefixes").glob("*/group-0.blocks")
    data = bytearray(path.read_bytes())
    for index in range(first, len(data) if last is None else last, 1024):
        data[index] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("part", marked_slow(["blocks", "headers"], slow=["headers"]))
def test_a_damaged_file_is_a_miss_and_never_wrong(
    part: str, tiny_base: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    file_slots = engine.core.parts.kv.disk
    assert file_slots is not None
    headers_end = 2048 * file_slots.slots[0].num_slots
    engine.close()
    if part == "headers":
        corrupt(tmp_path, first=100, last=headers_end)
    else:
        corrupt(tmp_path, first=headers_end, last=None)
    engine = make_engine(tiny_base, tmp_path)
    assert ask(engine, PROMPT) == (first, 0)
    assert num_from_disk(engine) == 0
    assert (engine.core.stats().num_disk_misreads > 0) == (part == "blocks")
    engine = restarted(engine, tiny_base, tmp_path)
    assert ask(engine, PROMPT) == (first, 4 * BLOCK), "written anew"
    engine.close()


def test_what_was_read_of_a_damaged_block_is_erased_on_the_host(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_file, "PIECE_BYTES", BLOCK_BYTES // 2)
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    disk = engine.core.parts.kv.disk
    assert disk is not None
    num_slots = disk.slots[0].num_slots
    engine.close()
    for slot in range(num_slots):  # the second half of each block
        start = num_slots * 2048 + slot * (BLOCK_BYTES + 2 * 16)
        corrupt(tmp_path, first=start + BLOCK_BYTES // 2 + 16, last=start + BLOCK_BYTES)
    engine = make_engine(tiny_base, tmp_path)
    host = engine.core.parts.runner.cache._host[0].tensors
    for tensor in host:
        tensor.zero_()
    assert ask(engine, PROMPT) == (first, 0)
    assert engine.core.stats().num_disk_misreads > 0
    assert not any(tensor.any() for tensor in host)
    engine.close()


def test_a_torn_write_is_a_miss(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ended between the block and its header, which is still another one's."""
    engine = make_engine(tiny_base, tmp_path, prefix_disk_bytes=4 * 2 * BLOCK_BYTES)
    first, _ = ask(engine, PROMPT)
    write = PrefixFile.write

    def torn(self: PrefixFile, slot: int, *args: object, **kwargs: object) -> bool:
        start = slot * 2048
        header = os.pread(self._descriptor, 2048, start)
        is_written = write(self, slot, *args, **kwargs)  # type: ignore[arg-type]
        os.pwrite(self._descriptor, header, start)
        return is_written

    monkeypatch.setattr(PrefixFile, "write", torn)
    displace(engine)
    monkeypatch.undo()
    monkeypatch.setattr(StepCosts, "recompute_seconds", lambda *_: 60.0)
    engine = restarted(engine, tiny_base, tmp_path, prefix_disk_bytes=4 * 2 * BLOCK_BYTES)
    assert engine.core.stats().disk_prefix_bytes > 0, "the headers are readable"
    assert ask(engine, PROMPT) == (first, 0)
    assert engine.core.stats().num_disk_misreads > 0
    engine.close()


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("write", errno.ENOSPC),
        pytest.param("read", errno.EIO, marks=pytest.mark.slow),
        pytest.param("write", errno.EIO, marks=pytest.mark.slow),
    ],
)
def test_a_failing_disk_turns_the_tier_off_and_harms_no_request(
    number: int, method: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    displace(engine)

    def fail(*_: object, **__: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PrefixFile, method, fail)
    ask(engine, [token + 1 for token in PROMPT])
    assert ask(engine, PROMPT) == (first, 0)
    assert engine.core.stats().num_disks_off == 1
    monkeypatch.undo()
    displace(engine)
    assert ask(engine, PROMPT) == (first, 0), "off until the next start"
    engine.core.parts.kv.check_integrity([])
    engine.close()


def test_a_disk_without_room_turns_the_tier_off_at_the_start(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path, prefix_disk_bytes=1 << 60)
    stats = engine.core.stats()
    assert (stats.num_disks_off, stats.disk_prefix_bytes) == (1, 0)
    first, _ = ask(engine, PROMPT)
    displace(engine)
    assert ask(engine, PROMPT) == (first, 0)
    engine.close()


def test_a_slow_disk_is_not_waited_for_longer_than_computing_takes(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    engine = restarted(engine, tiny_base, tmp_path)
    ask(engine, [1, 2, 3])
    monkeypatch.setattr(StepCosts, "recompute_seconds", lambda *_: 0.05)
    reads = []
    monkeypatch.setattr(DiskStore, "read", lambda self, *args: reads.append(args))
    name = engine.submit(PROMPT, max_tokens=6, ignore_eos=True)
    while engine.answers[name].finished is None:
        engine.step()
    assert len(reads) == 4
    assert engine.answers[name].token_ids == first
    assert engine.core.stats().num_disk_waits_given_up == 1
    assert engine.core.stats().num_disk_cached_tokens == 0
    engine.close()


def test_others_run_while_a_request_waits_for_the_disk(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    engine = restarted(engine, tiny_base, tmp_path)
    ask(engine, [1, 2, 3])
    read, held = DiskStore.read, []
    monkeypatch.setattr(DiskStore, "read", lambda self, *args: held.append(args))
    waiting = engine.submit(PROMPT, max_tokens=6, ignore_eos=True)
    other = engine.submit([5, 6, 7], max_tokens=6, ignore_eos=True)
    while engine.answers[other].finished is None:
        engine.step()
    assert engine.answers[waiting].started is None
    assert engine.core.parts.scheduler.num_waiting == 1
    monkeypatch.undo()
    disk = engine.core.parts.disk
    assert disk is not None
    for args in held:
        read(disk, *args)
    engine.run()
    assert engine.answers[waiting].token_ids == first
    started = engine.answers[waiting].started
    assert started is not None
    assert started.num_cached_tokens == 4 * BLOCK
    engine.close()


def test_a_request_that_ends_while_it_waits_leaves_nothing(tiny_base: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_base, tmp_path)
    ask(engine, PROMPT)
    engine = restarted(engine, tiny_base, tmp_path)
    name = engine.submit(PROMPT, max_tokens=6)
    engine.abort(name)
    engine.run()
    assert engine.answers[name].end.num_generated_tokens == 0
    engine.core.parts.kv.check_integrity([])
    engine.close()


def test_requests_that_arrive_together_share_one_read(tiny_base: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    engine = restarted(engine, tiny_base, tmp_path)
    names = [engine.submit(PROMPT, max_tokens=6, ignore_eos=True) for _ in range(2)]
    engine.run()
    assert engine.tokens(names) == [first, first]
    assert num_from_disk(engine) == 4
    engine.close()


def test_what_is_computed_sooner_is_not_read(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    engine = restarted(engine, tiny_base, tmp_path)
    ask(engine, [1, 2, 3])
    monkeypatch.setattr(StepCosts, "read_seconds", lambda *_: 3600.0)
    assert ask(engine, PROMPT) == (first, 0)
    assert num_from_disk(engine) == 0
    engine.close()


def test_one_tenant_leaves_the_others_their_part_of_the_disk(
    tiny_base: Path, tmp_path: Path
) -> None:
    num_slots = 16
    engine = make_engine(
        tiny_base, tmp_path, prefix_disk_bytes=num_slots * (BLOCK_BYTES + 2064), tenant_cap=0.5
    )
    disk = engine.core.parts.kv.disk
    assert disk is not None
    assert disk.slots[0].num_slots == num_slots
    ask(engine, PROMPT)
    displace(engine, ["flood"])
    displace(engine, ["flood"])
    assert ask(engine, PROMPT)[1] == 4 * BLOCK
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "kv_cache_bytes"), [("int8", 30_720), ("int4", 230_000), ("int2", 230_000)]
)
def test_quantized_blocks_come_back_as_they_were(
    kv_dtype: str, kv_cache_bytes: int, tiny_base: Path, tmp_path: Path
) -> None:
    """A hit on the device is the reference: its codes are those that the disk has."""
    config = {"kv_dtype": kv_dtype, "kv_cache_bytes": kv_cache_bytes}
    engine = make_engine(tiny_base, tmp_path, **config)
    ask(engine, PROMPT)
    expected, num_cached = ask(engine, PROMPT)
    assert num_cached == 4 * BLOCK
    engine = restarted(engine, tiny_base, tmp_path, **config)
    assert ask(engine, PROMPT) == (expected, 4 * BLOCK)
    assert num_from_disk(engine) > 0
    engine.close()


@pytest.mark.slow
def test_a_restart_with_other_free_memory_finds_the_prefixes_of_several_groups(
    tmp_path: Path,
) -> None:
    """The sizes of the device's pools are measured at each start."""
    model = save_family(tmp_path / "model", *SERVED["gemma3-window"])
    prompt = [token % VOCAB_SIZE for token in PROMPT]
    config = {"swap_bytes": 4 << 20, "prefix_disk_bytes": 8 << 20}
    engine = make_engine(model, tmp_path, kv_cache_bytes=4 << 20, **config)
    num_blocks = [group.num_usable for group in engine.core.parts.plan.kv_groups]
    first, _ = ask(engine, prompt)
    engine = restarted(engine, model, tmp_path, kv_cache_bytes=5 << 20, **config)
    others = [group.num_usable for group in engine.core.parts.plan.kv_groups]
    assert num_blocks[0] * others[1] != num_blocks[1] * others[0], "another proportion"
    assert ask(engine, prompt) == (first, 4 * BLOCK)
    assert num_from_disk(engine) > 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_next", "mamba2"])
def test_a_snapshot_of_states_comes_back(case: str, tmp_path: Path) -> None:
    """Beside keys and values, and alone."""
    model_type, differences = STATES[case]
    model = save_family(
        tmp_path / "model", model_type, {**differences, "tie_word_embeddings": False}
    )
    config = {"kv_cache_bytes": 4 << 20, "swap_bytes": 4 << 20, "prefix_disk_bytes": 8 << 20}
    engine = make_engine(model, tmp_path, **config)
    prompt = [token % VOCAB_SIZE for token in PROMPT[:41]]
    first, _ = ask(engine, prompt)
    engine = restarted(engine, model, tmp_path, **config)
    second, num_cached = ask(engine, prompt)
    assert second == first
    assert num_cached > 0
    assert num_from_disk(engine) > 0
    engine.close()


@pytest.mark.slow
def test_a_crowd_has_the_tokens_of_requests_alone(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """Steps in flight, drafts, preemptions and a restart in between."""
    alone = LocalEngine(tiny_base, tmp_path, prefix_caching=False)
    config = {
        "kv_cache_bytes": 16 * BLOCK_BYTES,
        "max_num_seqs": 5,
        "async_scheduling": True,
        "speculation": ("ngram",),
    }
    crowd = make_engine(tiny_base, tmp_path, **config)
    keys = [alone.add_adapter(folder) for folder in adapter_folders]
    rng = random.Random(1)
    beginnings = [rng.choices(range(256), k=3 * BLOCK) for _ in range(4)]
    for life in range(2):
        if life:
            crowd = restarted(crowd, tiny_base, tmp_path, **config)
        assert [crowd.add_adapter(folder) for folder in adapter_folders] == keys
        cases, names = [], []
        for _ in range(20):
            prompt = rng.choice(beginnings) + rng.choices(range(256), k=rng.randint(1, 20))
            adapter, max_tokens = rng.choice([None, *keys]), rng.randint(1, 20)
            cases.append((prompt, adapter, max_tokens))
            names.append(crowd.submit(prompt, adapter, max_tokens=max_tokens, ignore_eos=True))
            for _ in range(rng.randint(0, 2)):
                crowd.step()
        crowd.run()
        for (prompt, adapter, max_tokens), actual in zip(cases, crowd.tokens(names), strict=True):
            name = alone.submit(prompt, adapter, max_tokens=max_tokens, ignore_eos=True)
            alone.run()
            assert actual == alone.answers[name].token_ids
        crowd.core.parts.kv.check_integrity([])
    assert num_from_disk(crowd) > 10
    alone.close()
    crowd.close()


@pytest.mark.parametrize(
    ("config", "param", "message"),
    [
        ({"prefix_disk_bytes": 1}, "prefix_disk_bytes", "requires --host-gib or --swap-gib"),
        ({"prefix_disk_dir": "x"}, "prefix_disk_dir", "requires --prefix-disk-gib"),
        (
            {"prefix_disk_bytes": 1, "swap_bytes": 1, "prefix_caching": False},
            "prefix_disk_bytes",
            "requires prefix caching",
        ),
    ],
)
def test_a_disk_that_could_not_be_used_is_refused(
    config: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message) as refused:
        EngineConfig("base", **config)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_a_group_of_ranks_has_no_disk(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="--tensor-parallel-size above 1") as refused:
        make_engine(tiny_base, tmp_path, tensor_parallel_size=2)
    assert refused.value.param == "prefix_disk_bytes"


def test_a_disk_without_a_folder_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="prefix_disk_dir"):
        make_engine(tiny_base, tmp_path, prefix_disk_dir=None)
