"""Which images are chosen for a GPU, and how the library loads them; over a fake driver."""

from pathlib import Path

import pytest

from fake_cuda import FakeCuda, install
from kernel_sources import make_sources, put_fake_nvcc_on_path
from latentd_kernels import build, manifest
from latentd_kernels.library import Library, choose_arch
from latentd_kernels.manifest import ManifestError


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    sources = make_sources(tmp_path / "csrc")
    build.build(["sm_80", "sm_90a", "compute_80"], tmp_path / "cubin", sources)
    monkeypatch.setattr(manifest, "SOURCES", sources)
    return tmp_path / "cubin"


def use(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> FakeCuda:
    fake = FakeCuda(capability)
    fake.param_sizes = {"scale": (8, 4, 4), "add": (8, 8, 4)}
    return install(monkeypatch, fake)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "compute_80"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_80"),
    ],
    ids=str,
)
def test_the_best_image_is_chosen(capability: tuple[int, int], arch: str | None) -> None:
    assert choose_arch(capability, build.ARCHITECTURES) == arch


def test_architecture_specific_code_runs_on_no_other_gpu() -> None:
    assert choose_arch((9, 1), ["sm_90a"]) is None


def test_a_gpu_whose_own_image_is_absent_takes_an_older_one_of_its_major_version() -> None:
    assert choose_arch((8, 9), ["sm_80", "compute_80"]) == "sm_80"


def test_code_for_a_newer_gpu_is_not_chosen() -> None:
    assert choose_arch((8, 0), ["sm_86", "sm_90a", "compute_90"]) is None


def test_all_images_of_the_device_are_loaded_at_once(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch)
    library = Library(built)
    assert (library.arch, library.sm_count, library.max_smem) == ("sm_90a", 132, 232448)
    assert fake.calls.count("load") == 2
    assert {"eager scale", "eager add"} <= set(fake.calls)


def test_a_newer_gpu_gets_the_portable_image(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, (13, 0))
    assert Library(built).arch == "compute_80"


def test_a_kernel_is_launched_by_name(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    fake.param_sizes["add"] = ()
    library = Library(built)
    library.launch("add", (1, 1, 1), 32, [], stream=0)
    assert [launch.function for launch in fake.launches] == ["add"]


def test_an_unknown_kernel_is_named_with_the_architecture(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    with pytest.raises(KeyError, match="no kernel 'sub' among the cubins for sm_90a"):
        Library(built).launch("sub", (1, 1, 1), 32, [], stream=0)


def test_a_stale_image_is_not_loaded(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch)
    (built / "sm_90a" / "add.cubin").write_bytes(b"foreign")
    with pytest.raises(ManifestError, match=r"add\.cubin is not the file that was compiled"):
        Library(built)
    assert "load" not in fake.calls


def test_a_gpu_without_an_image_is_named_with_what_is_there(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, (7, 5))
    with pytest.raises(
        ManifestError, match=r"runs on Fake GPU \(compute capability 7\.5\); present: compute_80, "
    ):
        Library(built)


def test_an_empty_folder_says_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    with pytest.raises(ManifestError, match=r"present: none; rebuild with `make cubins`"):
        Library(tmp_path)
