"""The cubin build, with a fake nvcc: what it compiles, keeps, refuses and leaves behind."""

import json
from pathlib import Path

import pytest

from kernel_sources import compiled, make_sources, put_fake_nvcc_on_path
from latentd_kernels import build, compiler, inventory, manifest
from latentd_kernels.compiler import BuildError

ARCHS = ("sm_90a", "compute_80")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    return make_sources(tmp_path / "csrc")


def test_every_source_gives_one_image_an_architecture_and_a_manifest(
    sources: Path, tmp_path: Path
) -> None:
    files = build.build(ARCHS, tmp_path / "cubin", sources)
    assert sorted(path.relative_to(tmp_path / "cubin").as_posix() for path in files) == [
        "compute_80/add.ptx", "compute_80/manifest.json", "compute_80/scale.ptx",
        "sm_90a/add.cubin", "sm_90a/manifest.json", "sm_90a/scale.cubin",
    ]  # fmt: skip
    for arch in ARCHS:
        assert set(manifest.load(tmp_path / "cubin", arch, sources).kernels) == {"scale", "add"}


def test_the_manifest_records_what_ptxas_says_spills_included(
    sources: Path, tmp_path: Path
) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    kernel = manifest.load(tmp_path / "cubin", "sm_90a", sources).kernels["scale"]
    assert kernel == manifest.Kernel(
        "scale.cubin", registers=40, static_smem=1024, stack=16, spill_stores=8, spill_loads=4
    )


def test_the_report_counts_images_and_names_what_spills(sources: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    build.build(ARCHS, tmp_path / "cubin", sources, report=lines.append)
    assert lines == [
        "sm_90a: 2 compiled, 0 unchanged, add spills, scale spills",
        "compute_80: 2 compiled, 0 unchanged",
    ]


def test_a_folder_of_an_architecture_is_compiled_for_that_one_alone(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "hopper").mkdir()
    text = (sources / "scale.cu").read_text()
    text = text.replace("shared.cuh", "../shared.cuh").replace("scale", "fast")
    (sources / "hopper" / "scale.cu").write_text(text)
    build.build(ARCHS, tmp_path / "cubin", sources)
    images = {
        arch: sorted(manifest.load(tmp_path / "cubin", arch, sources).images) for arch in ARCHS
    }
    assert images["sm_90a"] == ["add.cubin", "hopper_scale.cubin", "scale.cubin"]
    assert images["compute_80"] == ["add.ptx", "scale.ptx"]
    page = inventory.render(inventory.collect(sources, tmp_path / "cubin"))
    assert page.index("## hopper/scale.cu") < page.index("### `fast`")
    compiled(sources), compiled(sources / "hopper")
    (sources / "shared.cuh").write_text("__device__ void body(float* x, int n, float s) {}\n")
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert compiled(sources) == compiled(sources / "hopper") == ["sm_90a scale.cu"]


def test_a_change_in_the_folder_makes_that_architecture_stale(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "hopper").mkdir()
    (sources / "hopper" / "sub.cu").write_text(
        (sources / "add.cu").read_text().replace("add", "sub")
    )
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    (sources / "hopper" / "sub.cu").write_text("// changed\n")
    with pytest.raises(manifest.ManifestError, match=r"stale: hopper/sub\.cu was changed"):
        manifest.load(tmp_path / "cubin", "sm_90a", sources)


def test_an_unchanged_tree_compiles_nothing(sources: Path, tmp_path: Path) -> None:
    build.build(ARCHS, tmp_path / "cubin", sources)
    assert len(compiled(sources)) == 4
    build.build(ARCHS, tmp_path / "cubin", sources)
    assert compiled(sources) == []


def test_a_changed_header_compiles_only_the_sources_that_include_it(
    sources: Path, tmp_path: Path
) -> None:
    build.build(ARCHS, tmp_path / "cubin", sources)
    compiled(sources)
    (sources / "shared.cuh").write_text("__device__ void body(float* x, int n, float s) {}\n")
    build.build(ARCHS, tmp_path / "cubin", sources)
    assert compiled(sources) == ["compute_80 scale.cu", "sm_90a scale.cu"]
    manifest.load(tmp_path / "cubin", "sm_90a", sources)


def test_another_compiler_release_compiles_everything_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    compiled(sources)
    nvcc = compiler.find_compiler()
    assert nvcc is not None
    newer = compiler.Compiler(nvcc.path, "nvcc 13.1.0")
    monkeypatch.setattr(build, "find_compiler", lambda: newer)
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert len(compiled(sources)) == 2


def test_cubins_for_racecheck_lie_apart_and_are_kept_as_well(sources: Path, tmp_path: Path) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    compiled(sources)
    flags = "-lineinfo -DLATENTD_ALL_LANES_ARRIVE"
    for expected in ([f"sm_90a add.cu {flags}", f"sm_90a scale.cu {flags}"], []):
        build.build(["sm_90a"], tmp_path / "lines", sources, for_racecheck=True)
        assert compiled(sources) == expected
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert compiled(sources) == []
    build.build(["sm_90a"], tmp_path / "lines", sources)  # as for a package
    assert compiled(sources) == ["sm_90a add.cu", "sm_90a scale.cu"]


def test_an_altered_image_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    compiled(sources)
    (tmp_path / "cubin" / "sm_90a" / "add.cubin").write_bytes(b"foreign")
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert compiled(sources) == ["sm_90a add.cu"]


def test_a_source_that_does_not_compile_names_itself_and_the_set_is_not_loadable(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "add.cu").write_text("#error no\n")
    with pytest.raises(BuildError, match=r"add\.cu does not compile for sm_90a:\n.*#error"):
        build.build(["sm_90a"], tmp_path / "cubin", sources)
    folder = tmp_path / "cubin" / "sm_90a"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "scale.cubin"]
    with pytest.raises(manifest.ManifestError, match=r"incomplete: add\.cu was not compiled"):
        manifest.load(tmp_path / "cubin", "sm_90a", sources)


def test_what_compiled_beside_a_failure_is_kept_for_the_next_build(
    sources: Path, tmp_path: Path
) -> None:
    good = (sources / "add.cu").read_text()
    (sources / "add.cu").write_text("#error no\n")
    with pytest.raises(BuildError):
        build.build(["sm_90a"], tmp_path / "cubin", sources)
    compiled(sources)
    (sources / "add.cu").write_text(good)
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert compiled(sources) == ["sm_90a add.cu"]


def test_the_image_of_a_removed_source_is_removed(sources: Path, tmp_path: Path) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    (sources / "add.cu").unlink()
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert not (tmp_path / "cubin" / "sm_90a" / "add.cubin").exists()
    assert set(manifest.load(tmp_path / "cubin", "sm_90a", sources).kernels) == {"scale"}


def test_an_entry_point_in_two_sources_is_refused(sources: Path, tmp_path: Path) -> None:
    (sources / "again.cu").write_text((sources / "add.cu").read_text())
    with pytest.raises(BuildError, match=r"add is in again\.cubin and in add\.cubin"):
        build.build(["sm_90a"], tmp_path / "cubin", sources)


def test_a_mangled_entry_point_is_refused(sources: Path, tmp_path: Path) -> None:
    (sources / "add.cu").write_text("__global__ void _Z3addPf(float* x) {}\n")
    with pytest.raises(BuildError, match='_Z3addPf is not extern "C"'):
        build.build(["sm_90a"], tmp_path / "cubin", sources)


def test_without_a_compiler_the_error_says_what_to_install(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(BuildError, match=r"no nvcc on the PATH.*pip install nvidia-cuda-nvcc==13"):
        build.build(["sm_90a"], tmp_path / "cubin", sources)


def test_the_compiler_wheels_are_found_in_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "nvidia" / "cu13"
    folder.mkdir(parents=True)
    put_fake_nvcc_on_path(folder / "bin", monkeypatch)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    assert compiler.find_compiler() == compiler.Compiler(folder / "bin" / "nvcc", "nvcc 13.0.88")
    assert build.needed_wheels() == ()


def test_the_compiler_wheels_are_needed_only_without_an_nvcc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.needed_wheels() == compiler.COMPILER_WHEELS


@pytest.mark.parametrize(
    ("choice", "archs"),
    [
        (None, build.ARCHITECTURES),
        ("", build.ARCHITECTURES),
        ("all", build.ARCHITECTURES),
        ("none", ()),
        ("sm_90a, sm_80", ("sm_90a", "sm_80")),
    ],
    ids=["unset", "empty", "all", "none", "list"],
)
def test_latentd_cubins_selects_architectures(choice: str | None, archs: tuple[str, ...]) -> None:
    assert build.select(choice) == archs


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match="unknown architecture 'sm_91': use none, all, or some of"):
        build.select("sm_90a,sm_91")


def test_remove_foreign_leaves_only_architectures_with_a_manifest(
    sources: Path, tmp_path: Path
) -> None:
    cubin = tmp_path / "cubin"
    build.build(["sm_90a"], cubin, sources)
    (cubin / "sm_70").mkdir()
    (cubin / "sm_80").mkdir()
    (cubin / "stray.cubin").write_bytes(b"")
    build.remove_foreign(cubin)
    assert [path.name for path in cubin.iterdir()] == ["sm_90a"]


def test_a_foreign_file_beside_the_images_is_removed(sources: Path, tmp_path: Path) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    (tmp_path / "cubin" / "sm_90a" / "stray.cubin").write_bytes(b"")
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert not (tmp_path / "cubin" / "sm_90a" / "stray.cubin").exists()


def test_an_unreadable_manifest_is_built_anew(sources: Path, tmp_path: Path) -> None:
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    (tmp_path / "cubin" / "sm_90a" / "manifest.json").write_text("{")
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert json.loads((tmp_path / "cubin" / "sm_90a" / "manifest.json").read_text())["format"] == 1


def test_check_compiles_nothing_and_exits_with_1_when_stale(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(manifest, "CUBIN_DIR", tmp_path / "cubin")
    assert build.main(["--check", "--arch", "sm_90a"]) == 1
    assert "there are no cubins for sm_90a" in capsys.readouterr().out
    assert compiled(sources) == []


def test_the_command_line_names_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--arch", "sm_1"]) == 1
    assert "unknown architecture 'sm_1'" in capsys.readouterr().err
