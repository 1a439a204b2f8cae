"""What identifies the weights of an engine and of its LoRAs."""

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.vllm.weights import LoRAs, default_weights_version, identify_files, identify_weights

BLOB = "0123456789" * 4
OPTIONS = SimpleNamespace(lora_dtype="auto", target_modules=None)


def write_safetensors(path: Path, name: str = "w", byte: bytes = b"\0") -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + byte * 16)


def set_time(path: Path, time_ns: int) -> None:
    os.utime(path, ns=(time_ns, time_ns))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "checkpoint-5").mkdir()
    for name in ("a.safetensors", "b.safetensors", "deep/c.safetensors"):
        write_safetensors(folder / name)
        set_time(folder / name, 10**18)
    for name in ("pytorch_model.bin", "quantize_config.json", "modeling.py", "tokenizer.json", ".cache/lock.json"):
        (folder / name).write_text("{}")
    return folder


def config_of(path: Path | str, **changes: Any) -> Any:
    """A configuration with what identifies weights."""
    load: dict[str, Any] = {"load_format": "auto", "download_dir": None, "model_loader_extra_config": {}}
    load |= {name: changes.pop(name) for name in tuple(changes) if name in load}
    of_model = {"model": str(path), "revision": None, "seed": 0, "model_weights": ""}
    of_model |= {name: changes.pop(name) for name in tuple(changes) if name in of_model}
    return SimpleNamespace(
        model_config=SimpleNamespace(**of_model),
        load_config=SimpleNamespace(**load),
        **{"speculative_config": None, **changes},
    )


def drafted(path: Path, load: Any = None) -> Any:
    """A speculative configuration with a draft model."""
    return SimpleNamespace(draft_model_config=config_of(path).model_config, draft_load_config=load)


def version(path: Path | str, **changes: Any) -> str:
    return default_weights_version(config_of(path, **changes))


def test_an_engine_that_loads_the_same_files_has_the_same_version(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert version(model) == version(model) == version(tmp_path / "link")
    assert version(model).startswith("files-")
    assert len(version(model)) < 256


def rewrite_in_place(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    set_time(path, status.st_mtime_ns + 1)


def replace_by_a_copy(path: Path) -> None:
    status, copy = path.stat(), path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    set_time(copy, status.st_mtime_ns)
    copy.replace(path)


def change_header_only(path: Path) -> None:
    status = path.stat()
    write_safetensors(path, name="v")
    set_time(path, status.st_mtime_ns)


def append(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    set_time(path, status.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a.safetensors", rewrite_in_place),
        ("deep/c.safetensors", rewrite_in_place),
        ("pytorch_model.bin", rewrite_in_place),
        ("a.safetensors", replace_by_a_copy),
        ("a.safetensors", change_header_only),
        ("a.safetensors", append),
        ("a.safetensors", lambda path: path.rename(path.with_name("z.safetensors"))),
        ("b.safetensors", Path.unlink),
        ("more.safetensors", write_safetensors),
        ("quantize_config.json", lambda path: path.write_text("[]")),
        ("modeling.py", lambda path: path.write_text("[]")),
    ],
)
def test_each_part_of_the_files_changes_it(model: Path, name: str, change: Callable[[Path], object]) -> None:
    before = version(model)
    change(model / name)
    assert version(model) != before
    assert version(model) == version(model)


@pytest.mark.parametrize("name", ["tokenizer.json", ".cache/lock.json", "README.md", "checkpoint-5/optimizer.pt"])
def test_files_that_change_no_contents_do_not(model: Path, name: str) -> None:
    before = version(model)
    (model / name).write_text("other")
    assert version(model) == before


def test_load_format_options_draft_and_dummy_seed_change_it(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    write_safetensors(draft / "d.safetensors")
    dummy_draft = SimpleNamespace(load_format="dummy", download_dir=None, model_loader_extra_config={})
    versions = [
        version(model),
        version(model, load_format="safetensors"),
        version(model, model_loader_extra_config={"pattern": "other"}),
        version(model, speculative_config=drafted(draft)),
        version(model, speculative_config=drafted(draft, dummy_draft)),
        version(model, load_format="dummy"),
        version(model, load_format="dummy", seed=1),
    ]
    assert len(set(versions)) == len(versions)
    assert all(each.startswith("files-") for each in versions)
    rewrite_in_place(draft / "d.safetensors")
    assert version(model, speculative_config=drafted(draft)) != versions[3]
    assert version(model, load_format="dummy") == versions[5], "no file is read"


def hub_copy(folder: Path, blob: str = BLOB, time_ns: int = 10**18) -> Path:
    """A snapshot in a cache of Hugging Face, with its own copy of a blob."""
    snapshot = folder / "snapshots" / "r1"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    write_safetensors(folder / "blobs" / blob)
    set_time(folder / "blobs" / blob, time_ns)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_copies_of_a_hub_snapshot_are_the_same_and_other_blobs_are_not(tmp_path: Path) -> None:
    first, copy = hub_copy(tmp_path / "1"), hub_copy(tmp_path / "2", time_ns=2 * 10**18)
    assert version(first) == version(copy)
    assert version(hub_copy(tmp_path / "3", blob=BLOB[::-1])) != version(first)
    unhashed = [hub_copy(tmp_path / name, blob="latest", time_ns=time) for name, time in (("4", 1), ("5", 2))]
    assert version(unhashed[0]) != version(unhashed[1]), "the name is no hash"


def unreadable(model: Path, name: str = "a.safetensors") -> Any:
    (model / name).unlink()
    (model / name).symlink_to("nowhere")
    return config_of(model)


def without_files(model: Path) -> Any:
    (model / "none").mkdir()
    (model / "none" / "README.md").write_text("weights")
    return config_of(model / "none")


@pytest.mark.parametrize(
    "make",
    [
        unreadable,
        without_files,
        lambda model: config_of(model, load_format="tensorizer"),
        lambda model: config_of(model, load_format="someones"),
        lambda model: config_of(model, load_format="runai_streamer", model_weights="s3://bucket/model"),
        lambda model: config_of(model, speculative_config=drafted(model / "nowhere", SimpleNamespace(load_format="x"))),
    ],
)
def test_what_cannot_be_identified_is_shared_with_nobody(
    model: Path, make: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = make(model)
    with caplog.at_level(logging.WARNING, "kvpool.client.vllm"):
        identify_weights(config)
        first = default_weights_version(config)
    assert first.startswith("unknown-")
    assert [(each.msg, vars(each)["setting"]) for each in caplog.records] == [
        ("weights not identified", "weights_version")
    ]
    assert default_weights_version(config) != first


def test_files_that_change_while_they_are_loaded_are_unknown(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    identify_weights(config)
    assert default_weights_version(config) == version(model)
    write_safetensors(model / "new.safetensors")
    assert default_weights_version(config).startswith("unknown-")

    (tmp_path / "current").symlink_to(model)
    config = config_of(tmp_path / "current")
    identify_weights(config)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(hub_copy(tmp_path / "hub"))
    assert default_weights_version(config).startswith("unknown-")


def test_a_download_may_add_blobs_while_the_model_is_loaded(tmp_path: Path) -> None:
    snapshot = hub_copy(tmp_path / "hub")
    path = snapshot / "model.safetensors"
    path.rename(tmp_path / "later")
    config = config_of(snapshot)
    identify_weights(config)
    (tmp_path / "later").rename(path)
    assert default_weights_version(config) == version(snapshot)
    (snapshot.parent.parent / "blobs" / BLOB[::-1]).write_bytes(b"\0" * 8)
    identify_weights(config)
    path.unlink()
    path.symlink_to(f"../../blobs/{BLOB[::-1]}")
    assert default_weights_version(config).startswith("unknown-")


def test_hundreds_of_files_are_identified_without_reading_their_weights(tmp_path: Path) -> None:
    for i in range(300):
        write_safetensors(tmp_path / f"{i}.safetensors")
        os.truncate(tmp_path / f"{i}.safetensors", 2**33)  # a hole: to read it would take minutes
    assert len(identify_files(str(tmp_path))) == 300


# ---- LoRAs


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    (folder / "checkpoint-1").mkdir(parents=True)
    write_safetensors(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def lora(path: Path, number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name="sql", lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def loaded_key(loras: LoRAs, request: Any) -> str:
    loras.load(request)
    return loras.key(request)


def test_a_lora_is_known_by_its_files_and_not_by_name_and_path(adapter: Path) -> None:
    before = loaded_key(LoRAs(OPTIONS), lora(adapter))
    assert loaded_key(LoRAs(OPTIONS), lora(adapter, number=7)) == before, "another engine may number it otherwise"
    write_safetensors(adapter / "checkpoint-1" / "adapter_model.safetensors")
    (adapter / "trainer_state.json").write_text("[]")
    assert loaded_key(LoRAs(OPTIONS), lora(adapter)) == before, "vLLM reads other files"
    rewrite_in_place(adapter / "adapter_model.safetensors")
    assert loaded_key(LoRAs(OPTIONS), lora(adapter)) != before


def test_files_that_change_without_a_load_leave_nothing_known(adapter: Path, caplog: pytest.LogCaptureFixture) -> None:
    loras, before = LoRAs(OPTIONS), (adapter / "adapter_model.safetensors").read_bytes()
    key = loaded_key(loras, lora(adapter))
    times = (adapter / "adapter_model.safetensors").stat()
    rewrite_in_place(adapter / "adapter_model.safetensors")
    later = [loaded_key(loras, lora(adapter)) for _ in range(2)]
    (adapter / "adapter_model.safetensors").write_bytes(before)  # vLLM may have loaded what was there meanwhile
    set_time(adapter / "adapter_model.safetensors", times.st_mtime_ns)
    later.append(loaded_key(loras, lora(adapter)))
    assert len({key, *later}) == 4
    assert all(each.startswith("unknown-") for each in later)
    assert [each.msg for each in caplog.records] == ["LoRA not identified"]


def test_a_load_in_place_is_known_by_the_new_files(adapter: Path) -> None:
    loras = LoRAs(OPTIONS)
    before = loaded_key(loras, lora(adapter))
    assert not loras.load(lora(adapter, load_inplace=True)), "the weights are the same"
    rewrite_in_place(adapter / "adapter_model.safetensors")
    assert loras.load(lora(adapter, load_inplace=True))
    assert loras.key(lora(adapter)) == loaded_key(LoRAs(OPTIONS), lora(adapter)) != before


def test_the_number_of_another_lora_is_unknown(adapter: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(other / "adapter_model.safetensors")
    loras = LoRAs(OPTIONS)
    key = loaded_key(loras, lora(adapter))
    assert loaded_key(loras, lora(other)).startswith("unknown-"), "vLLM may still have the first"
    assert loaded_key(loras, lora(other, number=2)) == loaded_key(LoRAs(OPTIONS), lora(other))
    assert loaded_key(LoRAs(OPTIONS), lora(adapter)) == key


def test_a_lora_that_cannot_be_read_is_known_to_nobody_until_it_can(adapter: Path) -> None:
    readable = loaded_key(LoRAs(OPTIONS), lora(adapter))
    (adapter / "kept").hardlink_to(adapter / "adapter_model.safetensors")
    unreadable(adapter, "adapter_model.safetensors")
    loras = LoRAs(OPTIONS)
    keys = {loaded_key(loras, lora(adapter)) for _ in range(2)}
    assert not loras.has_changed(lora(adapter))
    keys.add(loras.key(lora(adapter)))
    assert len(keys) == 3
    assert all(each.startswith("unknown-") for each in keys)
    (adapter / "kept").replace(
        adapter / "adapter_model.safetensors"
    )  # as a download that vLLM makes for the first step
    keys.add(loras.key(lora(adapter)))
    assert not loras.has_changed(lora(adapter))
    assert loras.key(lora(adapter)) == readable
    assert len(keys) == 4


def test_files_that_change_before_the_first_step_are_noticed_after_it(adapter: Path) -> None:
    loras = LoRAs(OPTIONS)
    loaded_key(loras, lora(adapter))
    assert not loras.has_changed(lora(adapter))
    rewrite_in_place(adapter / "adapter_model.safetensors")
    assert loras.has_changed(lora(adapter))
    assert loras.key(lora(adapter)).startswith("unknown-")


def test_a_lora_that_each_step_loads_is_known_to_its_engine_only(adapter: Path) -> None:
    requests = lora(adapter, load_inplace=True)
    loras, others = LoRAs(OPTIONS), LoRAs(OPTIONS)
    key = loaded_key(loras, requests)
    assert loaded_key(loras, requests) == key
    assert key not in (loaded_key(others, requests), others.key(lora(adapter)))


@pytest.mark.parametrize("change", [{"target_modules": ["q_proj"]}, {"lora_dtype": "float16"}])
def test_what_is_applied_of_a_lora_changes_its_key(adapter: Path, change: dict[str, Any]) -> None:
    other = SimpleNamespace(**{**vars(OPTIONS), **change})
    assert loaded_key(LoRAs(other), lora(adapter)) != loaded_key(LoRAs(OPTIONS), lora(adapter))


def test_a_lora_whose_files_were_deleted_stays_what_it_is(adapter: Path) -> None:
    loras = LoRAs(OPTIONS)
    key = loaded_key(loras, lora(adapter))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to("nowhere")
    assert loaded_key(loras, lora(adapter)) == key


def test_a_failed_load_leaves_nothing_known(adapter: Path) -> None:
    loras = LoRAs(OPTIONS)
    key = loaded_key(loras, lora(adapter))
    rewrite_in_place(adapter / "adapter_model.safetensors")
    loras.load(lora(adapter, load_inplace=True))
    loras.forget(lora(adapter))
    assert loras.key(lora(adapter)).startswith("unknown-")
    assert loras.key(lora(adapter)) != key
