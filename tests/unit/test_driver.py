"""The driver module and kernel launches over a fake driver."""

import ctypes
import struct
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from fake_cuda import FakeCuda, install
from latentd_kernels import driver
from latentd_kernels.driver import DriverError
from latentd_kernels.function import Function, load_module

FAULT = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda())


def make_function(fake: FakeCuda, *sizes: int) -> Function:
    fake.param_sizes["kernel"] = sizes
    return Function(load_module(b"image\0"), "kernel", driver.use_device())


def launch(function: Function, *args: Any, smem: int = 0, pdl: bool = True, grid: int = 3) -> None:
    function.launch((grid, 2, 1), 128, args, 99, smem, pdl)


def test_a_machine_without_a_driver_has_no_device(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cuInit(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setattr(fake, "cuInit", cuInit)
    assert driver.device_count() == 0
    with pytest.raises(DriverError, match="cuInit failed with -1: no NVIDIA driver: libcuda") as e:
        driver.use_device()
    assert e.value.code == driver.NO_DRIVER


def test_a_driver_without_a_device_counts_none(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "cuDeviceGetCount", _named("cuDeviceGetCount", 100, None))
    assert driver.device_count() == 0


def test_an_error_carries_function_code_and_text(fake: FakeCuda) -> None:
    with pytest.raises(DriverError) as caught:
        driver.use_device(1)
    assert (caught.value.function, caught.value.code) == ("cuDeviceGet", 101)
    assert str(caught.value) == (
        "cuDeviceGet failed with 101: CUDA_ERROR_INVALID_DEVICE, words for 101"
    )


def test_a_driver_that_is_too_old_is_named_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, FakeCuda(version=12080))
    with pytest.raises(DriverError, match=r"supports CUDA 12\.8, the cubins need 13\.0: update"):
        driver.use_device()


def test_the_primary_context_becomes_current(fake: FakeCuda) -> None:
    device = driver.use_device()
    assert fake.calls == ["current context"]
    assert (device.name, device.capability, device.sm_count) == ("Fake GPU", (9, 0), 132)


def test_memory_info_gives_free_and_total_bytes(fake: FakeCuda) -> None:
    assert driver.memory_info() == (1 << 36, 1 << 37)


def test_a_stream_is_idle_busy_or_faulted(fake: FakeCuda) -> None:
    assert driver.is_idle(1)
    fake.stream_status = cuda.CUresult.CUDA_ERROR_NOT_READY
    assert not driver.is_idle(1)
    fake.stream_status = FAULT
    with pytest.raises(DriverError, match="cuStreamQuery failed with 700"):
        driver.is_idle(1)


def test_a_capture_gives_a_graph_that_knows_its_nodes_and_replays(fake: FakeCuda) -> None:
    driver.begin_capture(7)
    graph = driver.end_capture(7)
    graph.launch(7)
    graph.close()
    assert graph.num_nodes == 5
    assert fake.calls == [
        "begin 7 CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
        "launch exec 7",
        "destroy exec",
        "destroy 77",
    ]


def test_an_aborted_capture_drops_the_graph(fake: FakeCuda) -> None:
    driver.abort_capture(7)
    assert fake.calls == ["destroy 77"]


def test_a_graph_that_does_not_launch_is_an_error(fake: FakeCuda) -> None:
    graph = driver.end_capture(7)
    fake.launch_status = FAULT
    with pytest.raises(DriverError, match="cuGraphLaunch failed with 700"):
        graph.launch(7)


def test_a_function_is_loaded_eagerly_and_may_use_all_shared_memory(fake: FakeCuda) -> None:
    function = make_function(fake)
    assert "eager kernel" in fake.calls
    limit = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert f"{limit} kernel {232448 - 1024}" in fake.calls
    assert (function.static_smem, function.registers) == (1024, 40)


def test_arguments_arrive_as_pointers_values_and_nulls(fake: FakeCuda) -> None:
    tensor = torch.zeros(4)
    launch(
        make_function(fake, 8, 4, 8, 8, 4),
        tensor,
        ctypes.c_int32(-5),
        None,
        ctypes.c_int64(1 << 40),
        ctypes.c_float(0.5),
    )
    packed = [tensor.data_ptr(), -5, 0, 1 << 40, 0.5]
    expected = [struct.pack(f"<{code}", v) for code, v in zip("QiQqf", packed, strict=True)]
    assert fake.launches[0].values == expected


def test_a_value_of_one_launch_does_not_leak_into_the_next(fake: FakeCuda) -> None:
    function = make_function(fake, 8)
    launch(function, ctypes.c_int64(7))
    launch(function, None)
    assert [launch.values for launch in fake.launches] == [[b"\7" + bytes(7)], [bytes(8)]]


def test_a_structure_is_passed_by_value(fake: FakeCuda) -> None:
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int32), ("b", ctypes.c_int32), ("c", ctypes.c_int32)]

    launch(make_function(fake, 12), Pair(1, 2, 3))
    assert fake.launches[0].values == [struct.pack("<3i", 1, 2, 3)]


def test_a_wrong_number_of_arguments_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(TypeError, match="kernel takes 2 arguments, 1 were given"):
        launch(make_function(fake, 8, 8), None)
    assert not fake.launches


def test_a_value_of_the_wrong_size_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(TypeError, match="argument 1 of kernel has 8 bytes, 4 were given"):
        launch(make_function(fake, 8, 8), None, ctypes.c_int32(1))


def test_a_launch_carries_grid_threads_shared_memory_and_stream(fake: FakeCuda) -> None:
    launch(make_function(fake), smem=70000)
    config = fake.launches[0].config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (70000, 99)


def test_the_overlap_attribute_is_set_where_it_is_asked_for(fake: FakeCuda) -> None:
    launch(make_function(fake))
    launch(make_function(fake), pdl=False)
    attributes = fake.launches[0].config.attrs
    key = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert [attribute.id for attribute in attributes] == [key]
    assert attributes[0].value.programmaticStreamSerializationAllowed == 1
    assert fake.launches[1].config.numAttrs == 0


def test_a_cluster_is_asked_for_beside_the_overlap(fake: FakeCuda) -> None:
    make_function(fake).launch((8, 2, 1), 128, [], 99, 0, True, (4, 2, 1))
    attributes = fake.launches[0].config.attrs
    assert fake.launches[0].config.numAttrs == 2
    cluster = attributes[1].value.clusterDim
    assert attributes[1].id == cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (cluster.x, cluster.y, cluster.z) == (4, 2, 1)


def test_a_tensor_map_is_made_of_bytes_and_elements_and_passed_by_value(fake: FakeCuda) -> None:
    tensor_map = driver.tensor_map(1 << 44, [64, 9, 100], [128, 1152], [64, 5, 64])
    address, dims, strides, box, steps, swizzle = fake.tensor_maps[0]
    assert (address, dims, strides, box) == (1 << 44, [64, 9, 100], [128, 1152], [64, 5, 64])
    assert steps == [1, 1, 1]
    assert swizzle == cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    launch(make_function(fake, 128), tensor_map)
    assert fake.launches[0].values == [struct.pack("<16Q", *range(1, 17))]


def test_a_gpu_before_hopper_is_not_asked_to_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeCuda((8, 9)))
    launch(make_function(fake))
    assert fake.launches[0].config.numAttrs == 0


def test_a_configuration_is_made_once(fake: FakeCuda) -> None:
    function = make_function(fake)
    for grid in (3, 3, 4):
        launch(function, grid=grid)
    first, second, third = (launch.config for launch in fake.launches)
    assert first is second
    assert third is not first


def test_more_shared_memory_than_a_cta_can_have_is_refused_with_the_limit(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match=r"kernel asks for 231425 bytes .* gives a CTA 231424"):
        launch(make_function(fake), smem=232448 - 1024 + 1)


def test_a_failed_launch_names_kernel_and_shape(fake: FakeCuda) -> None:
    function = make_function(fake)
    fake.launch_status = FAULT
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx failed with 700: .*\(kernel, grid "):
        launch(function)


def _named(name: str, code: int, *values: Any) -> Any:
    def function(*args: Any) -> Any:
        return cuda.CUresult(code), *values

    function.__name__ = name
    return function
