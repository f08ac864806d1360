"""Pushing, naming and deleting adapters over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport
from loraplex.api.adapters.memory_room import check_fits
from support.envelopes import check_envelope
from support.fake_engine import fake_info
from support.http_uploads import WEIGHTS, commit, declaration, open_upload, put
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for


@pytest.fixture
def altered(adapters: list[Path], tmp_path: Path) -> Path:
    """A copy of an adapter to spoil."""
    return Path(shutil.copytree(adapters[0], tmp_path / "altered"))


def test_a_pushed_adapter_has_a_report_and_an_effect(caller: Caller, adapters: list[Path]) -> None:
    version = caller.push(adapters[0], "bot", aliases=["prod", "blue"])
    assert version["id"] == f"{caller.slug}/bot@1"
    assert version["state"] == "ready"
    assert version["digest"].startswith("sha256:")
    assert version["report"]["max_rank"] == 4
    assert version["attestation"]["max_logit_delta"] > 0.01
    assert version["attestation"]["noise_floor"] < 1e-4
    assert version["attestation"]["max_kl_divergence"] > 0
    assert version["attestation"]["reference"] == "not measured"
    assert version["report"]["delta_norm"] > 0
    assert version["report"]["largest_deltas"][0]["norm"] > 0
    wait_for(lambda: caller.http.get("/v1/adapters").json()["data"][0]["tier"] == "device")
    shown = caller.http.get("/v1/adapters/bot").json()
    assert shown["aliases"] == {"prod": 1, "blue": 1}
    assert [entry["id"] for entry in shown["versions"]] == [version["id"]]
    (listed,) = caller.http.get("/v1/adapters").json()["data"]
    assert (listed["id"], listed["aliases"]) == (shown["id"], shown["aliases"])
    assert caller.http.get("/v1/adapters/bot/versions").json()["data"] == shown["versions"]


def test_an_upload_goes_on_where_it_stopped(caller: Caller, adapters: list[Path]) -> None:
    weights = (adapters[0] / WEIGHTS).read_bytes()
    upload = open_upload(caller, adapters[0])
    assert put(caller, upload, weights[:1000], 0).json()["received_bytes"] == 1000

    again = open_upload(caller, adapters[0])
    assert (again["id"], again["received_bytes"]) == (upload["id"], 1000)
    wrong = put(caller, upload, weights[:5], 5)
    assert "1000" in check_envelope(wrong, "upload_conflict")["message"]
    check_envelope(commit(caller, upload), "upload_conflict")

    assert put(caller, upload, weights[1000:], 1000).status_code == 200
    first, second = commit(caller, upload).json(), commit(caller, upload).json()
    assert first["version"] == second["version"] == 1


def test_a_broken_part_is_taken_up_where_the_server_says(
    caller: Caller, adapters: list[Path]
) -> None:
    weights = (adapters[0] / WEIGHTS).read_bytes()
    upload = open_upload(caller, adapters[0])

    def broken() -> Iterator[bytes]:
        yield weights[:4096]
        raise ConnectionAbortedError

    def resume() -> bool:
        stands = caller.http.get(f"/v1/uploads/{upload['id']}").json()["received_bytes"]
        return put(caller, upload, weights[stands:], stands).is_success

    with pytest.raises(ConnectionAbortedError):
        put(caller, upload, broken(), 0)
    wait_for(resume)
    assert commit(caller, upload).json()["digest"].startswith("sha256:")


def test_more_bytes_than_declared_are_refused(caller: Caller, adapters: list[Path]) -> None:
    weights = (adapters[0] / WEIGHTS).read_bytes()
    upload = open_upload(caller, adapters[0])
    check_envelope(put(caller, upload, weights + b"x", 0), "body_too_large")
    assert caller.http.get(f"/v1/uploads/{upload['id']}").json()["received_bytes"] == 0, (
        "its length said so: nothing was read"
    )
    check_envelope(put(caller, upload, iter([weights, b"x"]), 0), "body_too_large")


def test_an_upload_beyond_every_limit_is_refused_when_it_is_declared(
    caller: Caller, adapters: list[Path]
) -> None:
    body = declaration(adapters[0], size_bytes=1 << 40)
    answer = caller.http.post("/v1/adapters/bot/uploads", json=body)
    assert "the most is" in check_envelope(answer, "file_too_large")["message"]
    assert caller.http.get("/v1/uploads").json()["data"] == []


def test_an_abandoned_upload_is_gone_at_once(
    caller: Caller, server: ServerUnderTest, adapters: list[Path]
) -> None:
    weights = (adapters[0] / WEIGHTS).read_bytes()
    upload = open_upload(caller, adapters[0])
    put(caller, upload, weights[:1000], 0)
    (listed,) = caller.http.get("/v1/uploads").json()["data"]
    assert (listed["id"], listed["received_bytes"]) == (upload["id"], 1000)
    held = server.gauge("uploads_held_bytes")
    assert len(weights) <= held <= server.gauge("uploads_budget_bytes")
    assert 0 < server.gauge("disk_free_bytes") < disk_usage(server.settings.data_dir).free
    staged = server.settings.data_dir / "uploads" / f"{upload['id']}.safetensors"
    assert staged.stat().st_size == 1000

    for _ in range(2):
        abandoned = caller.http.delete(f"/v1/uploads/{upload['id']}")
        assert abandoned.json()["state"] == "abandoned", abandoned.text
    assert not staged.exists()
    assert server.gauge("uploads_held_bytes") <= held - len(weights)
    assert caller.http.get("/v1/uploads").json()["data"] == []
    check_envelope(put(caller, upload, weights[1000:], 1000), "upload_conflict")
    assert open_upload(caller, adapters[0])["id"] != upload["id"]


def test_what_became_a_version_cannot_be_abandoned(caller: Caller, adapters: list[Path]) -> None:
    upload = open_upload(caller, adapters[0])
    put(caller, upload, (adapters[0] / WEIGHTS).read_bytes(), 0)
    commit(caller, upload)
    check_envelope(caller.http.delete(f"/v1/uploads/{upload['id']}"), "state_conflict")


def test_other_bytes_than_declared_are_refused(caller: Caller, adapters: list[Path]) -> None:
    weights = bytearray((adapters[0] / WEIGHTS).read_bytes())
    upload = open_upload(caller, adapters[0])
    weights[-1] ^= 1
    put(caller, upload, bytes(weights), 0)
    check_envelope(commit(caller, upload), "digest_mismatch")
    check_envelope(commit(caller, upload), "digest_mismatch")
    assert caller.http.get(f"/v1/uploads/{upload['id']}").json()["state"] == "rejected"


def push_raw(caller: Caller, folder: Path, **changes: Any) -> httpx.Response:
    upload = open_upload(caller, folder, **changes)
    put(caller, upload, (folder / WEIGHTS).read_bytes(), 0)
    return commit(caller, upload)


def test_rejections_name_the_reason_and_the_tensor(caller: Caller, altered: Path) -> None:
    tensors = load_file(altered / WEIGHTS)
    name = next(name for name in tensors if "q_proj" in name and "lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :-1].copy()}, altered / WEIGHTS)
    check_envelope(push_raw(caller, altered), "shape_mismatch", param=name)

    save_file({**tensors, "surplus.weight": tensors[name]}, altered / WEIGHTS)
    check_envelope(push_raw(caller, altered), "unbound_tensor", param="surplus.weight")

    zeros = {key: value * ("lora_A" in key) for key, value in tensors.items()}
    save_file(zeros, altered / WEIGHTS)
    check_envelope(push_raw(caller, altered), "no_effect")

    (altered / WEIGHTS).write_bytes(b"\x80\x04" + b"x" * 100)
    answer = push_raw(caller, altered)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] in {"pickle_refused", "not_safetensors"}
    assert caller.http.get("/v1/adapters").json()["data"] == []


def test_an_effect_below_the_noise_is_rejected_by_attestation(
    caller: Caller, altered: Path
) -> None:
    tensors = load_file(altered / WEIGHTS)
    tiny = {name: value * 1e-12 for name, value in tensors.items()}
    save_file(tiny, altered / WEIGHTS)
    version = push_raw(caller, altered).json()
    path = f"/v1/adapters/bot/versions/{version['version']}"
    settled = wait_for(
        lambda: (found := caller.http.get(path).json())["state"] == "rejected" and found
    )
    assert settled["reason"]["code"] == "no_effect"
    chat = {"model": "bot", "messages": [{"role": "user", "content": "x"}]}
    answer = caller.http.post("/v1/chat/completions", json=chat)
    assert "no_effect" in check_envelope(answer, "adapter_not_ready")["message"]


def test_an_adapter_whose_products_overflow_is_rejected_by_attestation(
    caller: Caller, altered: Path
) -> None:
    tensors = load_file(altered / WEIGHTS)
    save_file({name: value * 1e20 for name, value in tensors.items()}, altered / WEIGHTS)
    version = push_raw(caller, altered).json()
    path = f"/v1/adapters/bot/versions/{version['version']}"
    settled = wait_for(
        lambda: (found := caller.http.get(path).json())["state"] == "rejected" and found
    )
    assert settled["reason"]["code"] == "numerical_error"
    assert "lower alpha" in settled["reason"]["message"]


def test_an_adapter_larger_than_the_arena_is_refused() -> None:
    report = IntakeReport(
        digest="sha256:0",
        base_id="base",
        file_sha256="0",
        size_bytes=1000,
        dtype="BF16",
        num_parameters=500,
        num_modules=1,
        min_rank=1,
        max_rank=1,
        targets=(),
        delta_norm=1.0,
        largest_deltas=(),
    )

    def check(dtype: str, *, arena_bytes: int, host_cache_bytes: int) -> None:
        server = fake_info("base")
        sizes = {"arena_bytes": arena_bytes, "host_cache_bytes": host_cache_bytes}
        check_fits(report, replace(server, dtype=dtype, **sizes))  # type: ignore[arg-type]

    check("bfloat16", arena_bytes=1000, host_cache_bytes=1000)
    check("float32", arena_bytes=2000, host_cache_bytes=2000)
    for arena_bytes, host_cache_bytes in ((1999, 2000), (2000, 1999)):
        with pytest.raises(AdapterRejected) as rejection:
            check("float32", arena_bytes=arena_bytes, host_cache_bytes=host_cache_bytes)
        assert rejection.value.reason == "adapter_too_large"
        assert "2000 bytes" in str(rejection.value)
        assert "1999" not in str(rejection.value), "how much room there is, is the machine's"
        assert "1999" in rejection.value.__notes__[0], "and in the operator's log"


def test_another_base_is_refused_before_a_byte_is_sent(
    caller: Caller, adapters: list[Path]
) -> None:
    body = declaration(adapters[0], base_id="sha256:other")
    check_envelope(
        caller.http.post("/v1/adapters/bot/uploads", json=body), "base_mismatch", "base_id"
    )
    own = caller.http.get("/v1/base").json()["base_id"]
    assert open_upload(caller, adapters[0], base_id=own)["state"] == "receiving"


@pytest.mark.parametrize(
    ("name", "change", "param"),
    [
        ("Bot", {}, "name"),
        ("..", {}, "name"),
        ("tiny", {}, "name"),
        ("bot", {"sha256": "A" * 64}, "sha256"),
        ("bot", {"size_bytes": 0}, "size_bytes"),
        ("bot", {"aliases": ["3"]}, "aliases"),
        ("bot", {"aliases": ["a"] * 17}, "aliases"),
        ("bot", {"config": []}, "config"),
    ],
)
def test_a_bad_declaration_is_refused(
    caller: Caller, adapters: list[Path], name: str, change: dict[str, Any], param: str
) -> None:
    path = f"/v1/adapters/{name.replace('.', '%2E')}/uploads"
    answer = caller.http.post(path, json=declaration(adapters[0], **change))
    check_envelope(answer, "invalid_parameter", param)


def test_control_bodies_have_a_limit_of_their_own(caller: Caller) -> None:
    answer = caller.http.post("/v1/adapters/bot/uploads", json={"config": {"a": "x" * (1 << 20)}})
    check_envelope(answer, "body_too_large")


def test_a_new_version_goes_live_by_its_alias(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot")
    ask: dict[str, Any] = {"model": "bot", "prompt": "x", "max_tokens": 1}
    assert caller.openai.completions.create(**ask).model.endswith("bot@1")
    moved = caller.http.put("/v1/adapters/bot/aliases/prod", json={"version": 2}).json()
    assert moved.pop("updated_at")
    assert moved == {
        "adapter": "bot",
        "alias": "prod",
        "version": 2,
        "canary": None,
        "object": "adapter.alias",
    }
    assert caller.openai.completions.create(**ask).model.endswith("bot@2")
    assert caller.openai.completions.create(**{**ask, "model": "bot@1"}).model.endswith("bot@1")
    assert caller.http.delete("/v1/adapters/bot/aliases/prod").status_code == 204
    check_envelope(caller.http.delete("/v1/adapters/bot/aliases/prod"), "alias_not_found")
    assert caller.openai.completions.create(**ask).model.endswith("bot@2")


def test_the_same_content_is_the_same_version(caller: Caller, adapters: list[Path]) -> None:
    first = caller.push(adapters[0], "bot")
    second = caller.push(adapters[0], "bot", aliases=["prod"])
    assert first["version"] == second["version"] == 1
    assert second["aliases"] == ["prod"]


def test_bytes_that_are_there_already_are_not_sent_again(
    caller: Caller, adapters: list[Path]
) -> None:
    version = caller.push(adapters[0], "bot")
    body = declaration(adapters[0], aliases=["prod"])
    again = caller.http.post("/v1/adapters/bot/uploads", json=body)
    assert again.status_code == 200
    known = again.json()
    assert known["already"] is True
    assert known["received_bytes"] == known["size_bytes"]
    assert known["version"] == {**version, "aliases": ["prod"], "tier": known["version"]["tier"]}
    assert caller.http.get("/v1/adapters/bot").json()["aliases"] == {"prod": 1}
    assert commit(caller, known).json()["version"] == 1, "who does not know of it commits as ever"


def test_only_the_same_bytes_of_a_live_version_are_there_already(
    caller: Caller, adapters: list[Path]
) -> None:
    def check_absent(body: dict[str, Any], name: str = "bot") -> None:
        upload = caller.http.post(f"/v1/adapters/{name}/uploads", json=body)
        assert upload.status_code == 201
        assert upload.json()["already"] is False
        assert upload.json()["received_bytes"] == 0

    caller.push(adapters[0], "bot")
    other_config = declaration(adapters[0])
    other_config["config"]["lora_alpha"] = 3
    check_absent(other_config)
    check_absent(declaration(adapters[1]))
    check_absent(declaration(adapters[0]), name="other")
    caller.http.delete("/v1/adapters/bot/versions/1")
    check_absent(declaration(adapters[0]))


def test_another_tenants_bytes_are_not_there_already(
    resident: Caller, caller: Caller, adapters: list[Path]
) -> None:
    assert resident.http.get("/v1/adapters/bot").is_success
    assert open_upload(caller, adapters[0])["already"] is False


def test_aliases_of_a_repeated_push_wait_for_the_attestation(
    caller: Caller, adapters: list[Path]
) -> None:
    upload = open_upload(caller, adapters[0])
    put(caller, upload, (adapters[0] / WEIGHTS).read_bytes(), 0)
    commit(caller, upload)
    body = declaration(adapters[0], aliases=["blue"])
    assert caller.http.post("/v1/adapters/bot/uploads", json=body).json()["already"] is True
    wait_for(lambda: caller.http.get("/v1/adapters/bot").json()["aliases"] == {"blue": 1})


def test_the_list_comes_in_pages_in_the_order_of_names(
    caller: Caller, adapters: list[Path]
) -> None:
    names = ["a", "b.1", "b-2", "c", "d"]
    for name in names:
        open_upload(caller, adapters[0], name=f"unfinished-{name}")
        caller.push(adapters[0], name)

    def page(**query: Any) -> dict[str, Any]:
        found: dict[str, Any] = caller.http.get("/v1/adapters", params=query).json()
        return found

    first = page(limit=2)
    assert first["has_more"] is True
    second = page(limit=2, after=first["next_after"])
    third = page(limit=2, after=second["next_after"])
    assert (third["has_more"], third["next_after"]) == (False, None)
    seen = [entry["name"] for part in (first, second, third) for entry in part["data"]]
    assert seen == sorted(names)
    assert page(limit=5)["has_more"] is False
    caller.http.delete(f"/v1/adapters/{first['data'][-1]['name']}")
    assert page(limit=2, after=first["next_after"])["data"] == second["data"]
    for query in ({"limit": 0}, {"limit": 501}, {"limit": "x"}, {"after": "x" * 257}):
        answer = caller.http.get("/v1/adapters", params=query)
        check_envelope(answer, "invalid_parameter", next(iter(query)))


def test_a_drain_has_bounds(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot")
    for seconds in ("-1", "601", "nan", "x"):
        for path in ("/v1/adapters/bot", "/v1/adapters/bot/versions/1"):
            answer = caller.http.delete(path, params={"drain_seconds": seconds})
            check_envelope(answer, "invalid_parameter", "drain_seconds")


def test_deleting_leaves_nothing_behind(
    caller: Caller, adapters: list[Path], server: ServerUnderTest
) -> None:
    version = caller.push(adapters[0], "bot", aliases=["prod"])
    hex_digest = version["digest"].removeprefix("sha256:")
    assert list(server.settings.data_dir.glob(f"store/t/{caller.tenant_id}/a/{hex_digest}*"))
    check_envelope(caller.http.delete("/v1/adapters/bot/versions/1"), "version_aliased")

    answer = caller.http.delete("/v1/adapters/bot", params={"drain_seconds": 5}).json()
    (deleted,) = answer["versions"]
    assert (deleted["version"], deleted["digest"]) == (1, version["digest"])
    assert deleted["receipt"]["is_content_shared"] is False
    assert deleted["requested_at"] <= deleted["finished_at"]
    assert caller.http.get("/v1/adapters/bot/deletions").json()["data"] == [deleted]
    assert not list(server.settings.data_dir.glob(f"store/t/{caller.tenant_id}/a/*"))
    check_envelope(caller.http.get("/v1/adapters/bot"), "adapter_not_found")
    check_envelope(caller.http.delete("/v1/adapters/bot"), "adapter_not_found")
    answer = caller.http.post("/v1/completions", json={"model": "bot", "prompt": "x"})
    check_envelope(answer, "model_not_found")

    assert caller.push(adapters[0], "bot")["version"] == 2


def test_deleting_one_of_two_names_of_a_content_leaves_the_other(
    caller: Caller, adapters: list[Path]
) -> None:
    caller.push(adapters[0], "one")
    caller.push(adapters[0], "two")
    receipt = caller.http.delete("/v1/adapters/one/versions/1").json()
    assert receipt["versions"][0]["receipt"]["is_content_shared"] is True
    assert caller.openai.completions.create(model="two", prompt="x", max_tokens=1).choices


def test_models_are_the_base_and_what_is_ready(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot", aliases=["prod"])
    cards = {card.id: card for card in caller.openai.models.list()}
    assert set(cards) == {"tiny", "bot"}
    assert cards["bot"].owned_by == caller.slug
    assert cards["bot"].parent == "tiny"  # type: ignore[attr-defined]
    for name in ("bot", f"{caller.slug}/bot", "bot@1", "bot@prod", f"{caller.slug}/bot@latest"):
        card = caller.openai.models.retrieve(name)
        assert card.id == name
        assert card.root == f"{caller.slug}/bot@1"  # type: ignore[attr-defined]
    assert caller.openai.models.retrieve("tiny").parent is None  # type: ignore[attr-defined]
    check_envelope(caller.http.get("/v1/models/nothing"), "model_not_found")
