"""Fingerprints: the same for a copy, another for anything that changes what is generated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_coserve.srt.batch_backend.loaded_model import fingerprint, sampled_ranges

SETTINGS = {"dtype": "bfloat16", "tp_size": 1}


def safetensors(path: Path, tensors: dict[str, bytes], metadata: str = "pt") -> Path:
    header: dict[str, object] = {"__metadata__": {"format": metadata}}
    end = 0
    for name, data in tensors.items():
        offsets = [end, end + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


def a_model(directory: Path, fill: bytes = b"\1") -> Path:
    directory.mkdir()
    tensors = {f"layer.{n}": fill * 50_000 for n in range(4)} | {"norm": b"\2" * 100}
    safetensors(directory / "model-1.safetensors", tensors)
    (directory / "adapter.bin").write_bytes(b"\3" * 3_000_000)
    (directory / "config.json").write_text('{"layers": 4}')
    (directory / "tokenizer.json").write_text('{"vocab": {}}')
    (directory / "README.md").write_text("read me")
    return directory


def poke(name: str, position: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = bytearray((model / name).read_bytes())
        content[position] ^= 1
        (model / name).write_bytes(content)

    return change


def rename(model: Path) -> None:
    (model / "config.json").rename(model / "config2.json")


def add(model: Path) -> None:
    (model / "merges.txt").write_text("")


def grow(model: Path) -> None:
    with (model / "adapter.bin").open("ab") as file:
        file.write(b"\3" * 4096)


@pytest.mark.parametrize(
    "change",
    [
        poke("config.json", 3),
        poke("tokenizer.json", 5),
        poke("model-1.safetensors", 20),
        poke("model-1.safetensors", -1),
        poke("adapter.bin", 0),
        poke("adapter.bin", -1),
        rename,
        add,
        grow,
    ],
)
def test_what_changes_the_model_changes_its_fingerprint(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = a_model(tmp_path / "model")
    before = fingerprint([model], SETTINGS)
    change(model)
    assert fingerprint([model], SETTINGS) != before


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "README.md").write_text("other words")
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    prints = {fingerprint([each], SETTINGS) for each in (model, copy, linked)}
    assert len(prints) == 1


def test_settings_and_adapters_count(tmp_path: Path) -> None:
    model, adapter = a_model(tmp_path / "model"), a_model(tmp_path / "adapter", b"\5")
    prints = {
        fingerprint([model], SETTINGS),
        fingerprint([model], SETTINGS | {"tp_size": 2}),
        fingerprint([model], SETTINGS | {"quantization": "fp8"}),
        fingerprint([model, adapter], SETTINGS),
        fingerprint([adapter, model], SETTINGS),
    }
    assert len(prints) == 5


def test_every_tensor_is_sampled_and_reads_are_bounded(tmp_path: Path) -> None:
    few = safetensors(tmp_path / "few.safetensors", {f"t{n}": b"x" * 40_000 for n in range(24)})
    # The header, and three pages for each.
    assert len(sampled_ranges(few)) == 1 + 3 * 24
    many = {f"t{n}": b"x" * 100 for n in range(400)}
    assert len(sampled_ranges(safetensors(tmp_path / "many.safetensors", many))) == 1 + 400
    most = {f"t{n}": b"x" * 100 for n in range(5000)}
    assert 400 < len(sampled_ranges(safetensors(tmp_path / "most.safetensors", most))) <= 1 + 512
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(10 << 30)
    ranges = sampled_ranges(large)
    assert len(ranges) == 512
    assert ranges[0][0] == 0
    assert ranges[-1][1] <= 10 << 30
    assert sum(end - start for start, end in ranges) <= 512 * 4096


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]" + b"y" * 9]
)
def test_a_malformed_file_is_sampled_like_any_other(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = fingerprint([tmp_path], SETTINGS)
    file.write_bytes(content + b"z")
    assert fingerprint([tmp_path], SETTINGS) != before


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OSError, match=str(tmp_path)):
            fingerprint([path], SETTINGS)
