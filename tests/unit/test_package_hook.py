"""The build hook: what it compiles where, what a wheel takes in, what it refuses to ship."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernel_sources import compiled, make_sources, put_fake_nvcc_on_path
from latentd_kernels import build, compiler, manifest

HOOK = Path(__file__).parents[2] / "kernels" / "hatch_build.py"


class App:
    """Hatchling's reporter, as far as the hook uses it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def display_info(self, line: str) -> None:
        self.lines.append(line)


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_hook(tmp_path: Path, target: str = "wheel") -> tuple[Any, App]:
    app = App()
    hook = load_hook().CubinHook(str(tmp_path), {}, None, None, str(tmp_path), target, app)
    return hook, app


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with two kernels and an empty cubin folder, and only the fake nvcc on the PATH."""
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(manifest, "SOURCES", make_sources(tmp_path / "csrc"))
    monkeypatch.setattr(manifest, "CUBIN_DIR", tmp_path / "cubin")
    monkeypatch.setenv("LATENTD_CUBINS", "sm_90a,compute_80")
    return tmp_path


def included(hook: Any) -> dict[str, Path]:
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    return {inside: Path(path) for path, inside in data["force_include"].items()}


def test_a_wheel_takes_in_exactly_what_was_compiled_for_it(tree: Path) -> None:
    hook, _ = make_hook(tree)
    files = included(hook)
    assert sorted(files) == [
        f"latentd_kernels/cubin/{name}"
        for name in (
            "compute_80/add.ptx", "compute_80/manifest.json", "compute_80/scale.ptx",
            "sm_90a/add.cubin", "sm_90a/manifest.json", "sm_90a/scale.cubin",
        )
    ]  # fmt: skip
    assert not any(path.is_relative_to(tree / "cubin") for path in files.values())
    assert all(path.is_file() for path in files.values())
    hook.finalize("standard", {}, "")
    assert not any(path.exists() for path in files.values())


def test_current_images_of_the_tree_are_not_compiled_again_for_a_wheel(tree: Path) -> None:
    build.build(["sm_90a", "compute_80"])
    compiled(tree / "csrc")
    hook, _ = make_hook(tree)
    assert len(included(hook)) == 6
    assert compiled(tree / "csrc") == []
    hook.finalize("standard", {}, "")


def test_foreign_and_stale_images_of_the_tree_do_not_ship(tree: Path) -> None:
    build.build(["sm_90a"])
    folder = tree / "cubin" / "sm_90a"
    (folder / "stray.cubin").write_bytes(b"foreign")
    (folder / "add.cubin").write_bytes(b"foreign")
    (tree / "csrc" / "scale.cu").write_text('extern "C" __global__ void scaled() {}\n')
    hook, _ = make_hook(tree)
    files = included(hook)
    assert "latentd_kernels/cubin/sm_90a/stray.cubin" not in files
    shipped = files["latentd_kernels/cubin/sm_90a/add.cubin"].parent
    assert set(manifest.load(shipped.parent, "sm_90a").kernels) == {"add", "scaled"}
    hook.finalize("standard", {}, "")


def test_a_source_that_does_not_compile_ends_the_build(tree: Path) -> None:
    (tree / "csrc" / "add.cu").write_text("#error no\n")
    hook, _ = make_hook(tree)
    with pytest.raises(compiler.BuildError, match=r"add\.cu does not compile for sm_90a"):
        included(hook)


def test_none_skips_with_one_line_and_asks_for_no_compiler(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTD_CUBINS", "none")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    hook, app = make_hook(tree)
    assert hook.dependencies() == []
    assert included(hook) == {}
    (line,) = app.lines
    assert line.startswith("LATENTD_CUBINS=none: no cubins are built")


def test_the_compiler_wheels_are_asked_for_without_an_nvcc(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert make_hook(tree)[0].dependencies() == list(compiler.COMPILER_WHEELS)
    assert make_hook(tree, "sdist")[0].dependencies() == []


def test_no_wheel_is_asked_for_when_an_nvcc_is_on_the_path(tree: Path) -> None:
    assert make_hook(tree)[0].dependencies() == []


def test_an_editable_install_writes_into_the_tree_and_removes_what_is_foreign(tree: Path) -> None:
    (tree / "cubin" / "sm_35").mkdir(parents=True)
    (tree / "cubin" / "stray.cubin").write_bytes(b"")
    hook, _ = make_hook(tree)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    assert data["force_include"] == {}
    assert sorted(path.name for path in (tree / "cubin").iterdir()) == ["compute_80", "sm_90a"]
    manifest.load(tree / "cubin", "sm_90a")


def test_a_source_distribution_carries_no_cubins(tree: Path) -> None:
    hook, _ = make_hook(tree, "sdist")
    assert included(hook) == {}
    assert not (tree / "cubin").exists()
