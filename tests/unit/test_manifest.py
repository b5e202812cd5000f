"""Which cubins may be loaded, and what is said of those that may not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_sources import make_sources, put_fake_nvcc_on_path
from latentd_kernels import build, manifest
from latentd_kernels.manifest import ManifestError


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    build.build(["sm_90a"], tmp_path / "cubin", make_sources(tmp_path / "csrc"))
    return tmp_path


def load(built: Path) -> manifest.Manifest:
    return manifest.load(built / "cubin", "sm_90a", built / "csrc")


def rewrite(built: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = built / "cubin" / "sm_90a" / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_a_current_set_loads_with_its_entry_points(built: Path) -> None:
    loaded = load(built)
    assert set(loaded.kernels) == {"add", "scale"}
    assert loaded.images["add.cubin"].compiler == "nvcc 13.0.88"
    assert loaded.images["add.cubin"].source == "add.cu"


def test_what_is_written_is_read_back(built: Path, tmp_path: Path) -> None:
    loaded = load(built)
    loaded.write(tmp_path)
    assert manifest.read(tmp_path, "sm_90a") == loaded


@pytest.mark.parametrize("name", ["add.cu", "shared.cuh"])
def test_a_changed_source_makes_the_set_stale_by_name(built: Path, name: str) -> None:
    with (built / "csrc" / name).open("a") as file:
        file.write("// changed\n")
    with pytest.raises(ManifestError, match=rf"are stale: {name} was changed, added or removed"):
        load(built)


def test_an_added_source_makes_the_set_stale(built: Path) -> None:
    (built / "csrc" / "new.cu").write_text("")
    with pytest.raises(ManifestError, match=r"stale: new\.cu"):
        load(built)


def test_a_removed_source_makes_the_set_stale(built: Path) -> None:
    (built / "csrc" / "add.cu").unlink()
    with pytest.raises(ManifestError, match=r"stale: add\.cu"):
        load(built)


def test_a_foreign_image_is_refused_by_name(built: Path) -> None:
    (built / "cubin" / "sm_90a" / "add.cubin").write_bytes(b"foreign")
    with pytest.raises(ManifestError, match=r"add\.cubin is not the file that was compiled"):
        load(built)


def test_half_an_image_is_refused(built: Path) -> None:
    path = built / "cubin" / "sm_90a" / "scale.cubin"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ManifestError, match=r"scale\.cubin is not the file that was compiled"):
        load(built)


def test_a_missing_image_is_refused_by_name(built: Path) -> None:
    (built / "cubin" / "sm_90a" / "add.cubin").unlink()
    with pytest.raises(ManifestError, match=r"add\.cubin is missing"):
        load(built)


def test_the_manifest_of_another_architecture_is_refused(built: Path) -> None:
    (built / "cubin" / "sm_90a").rename(built / "cubin" / "sm_80")
    with pytest.raises(ManifestError, match="is for sm_90a, not for sm_80"):
        manifest.load(built / "cubin", "sm_80", built / "csrc")


def test_another_geometry_is_refused_with_both_values(built: Path) -> None:
    rewrite(built, lambda body: body["geometry"].update(page_size=128))
    with pytest.raises(ManifestError, match=r"geometry .*'page_size': 128.* has .*'page_size': 64"):
        load(built)


def test_another_arithmetic_version_is_refused(built: Path) -> None:
    rewrite(built, lambda body: body.update(arithmetic_version=0))
    with pytest.raises(ManifestError, match="has arithmetic_version 0, this latentd has"):
        load(built)


def test_another_manifest_format_is_refused(built: Path) -> None:
    rewrite(built, lambda body: body.update(format=2))
    with pytest.raises(ManifestError, match="has format 2, this latentd reads 1"):
        load(built)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "{}", '{"format": 1}'], ids=repr
)  # fmt: skip
def test_a_manifest_that_is_no_manifest_is_refused(built: Path, text: str) -> None:
    (built / "cubin" / "sm_90a" / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="cannot be read"):
        load(built)


def test_missing_cubins_are_named_with_the_way_to_build_them(tmp_path: Path) -> None:
    with pytest.raises(
        ManifestError,
        match=r"no cubins for sm_90a in .*; rebuild with `make cubins` or .*--arch sm_90a`",
    ):
        manifest.load(tmp_path, "sm_90a")


def test_a_reader_never_sees_half_of_an_atomic_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    manifest.write_atomically(path, b"old")
    manifest.write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"new"
