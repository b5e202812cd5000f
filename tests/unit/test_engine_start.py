"""Starting an engine: device choice, self-test, report, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import scenarios
from latentd import backend
from latentd.backend_device import choose_device
from latentd.checkpoint import CheckpointError
from latentd.options import EngineOptions, SelftestFailed, StartError
from latentd.selftest import run_selftest
from latentd.selftest_probe import slab_of
from latentd_kernels import ARITHMETIC_VERSION
from latentd_kernels.driver import device_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]


def test_auto_says_what_it_chose_and_why(tiny_dir: Path) -> None:
    options = EngineOptions(tiny_dir, dtype="float32")
    device, why = choose_device(options)
    assert (device.type, why) == ("cpu", "dtype float32 runs on the cpu only")


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU")
def test_cuda_is_refused_without_a_gpu(tiny_dir: Path) -> None:
    with pytest.raises(StartError, match="no NVIDIA GPU or no driver"):
        choose_device(EngineOptions(tiny_dir, device="cuda"))
    assert choose_device(EngineOptions(tiny_dir))[1] == "no NVIDIA GPU or no driver"


def test_the_hash_of_the_tokenizer_beside_the_weights_is_told(
    start: Start, write_config: Callable[..., Path]
) -> None:
    folder = write_config()
    assert start(model_dir=folder).info.tokenizer == ""
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert start(model_dir=folder).info.tokenizer == hashlib.sha256(b"{}").hexdigest()


def test_the_self_test_passes_and_leaves_nothing_behind(start: Start) -> None:
    engine = start(selftest=True)
    assert [line.split(":")[0] for line in engine.startup.selftest] == [
        "attend, row alone = row in a run",
        "row alone = row in a batch",
        "logits are finite",
        "stream = steps",
        "page order",
    ]
    assert not slab_of(engine).any()
    assert engine.stats()["steps"] == engine.stats()["slots_used"] == 0
    assert (engine.backend.runner.buffers.inputs.block_table == -1).all()  # type: ignore[attr-defined]


def test_a_difference_in_attention_fails_the_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    runner = engine.backend.runner  # type: ignore[attr-defined]
    attend = runner.attend

    def disturbed(rows: int) -> None:
        attend(rows)
        runner.buffers.attend.host_o[:, 1] += 1

    monkeypatch.setattr(runner, "attend", disturbed)
    with pytest.raises(SelftestFailed, match="attend, row alone"):
        run_selftest(engine).require()


def test_the_self_test_needs_an_idle_engine(start: Start) -> None:
    engine = start()
    scenarios.open_slot(engine, [1])
    with pytest.raises(StartError, match="without slots in use"):
        run_selftest(engine)


def test_a_difference_fails_the_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    runner = engine.backend.runner  # type: ignore[attr-defined]
    decode, calls = runner.decode, []

    def disturbed(rows: int) -> None:
        decode(rows)
        if rows > 1:
            calls.append(rows)
            runner.buffers.acts.logits[0, 0] += 1e-3

    monkeypatch.setattr(runner, "decode", disturbed)
    report = run_selftest(engine)
    assert report.verdict == "FAILED: 1 of 5 checks found a difference"
    with pytest.raises(SelftestFailed, match="row 0 of bucket 2"):
        report.require()
    assert calls


def test_a_stream_that_differs_fails_the_start(start: Start) -> None:
    engine = start()
    ops = engine.backend.runner.ops  # type: ignore[attr-defined]
    stage = ops.stage

    def disturbed(rows: int, heads: int = 0, chunk: bool = False) -> None:
        ops.inputs.last_token.fill_(1)
        stage(rows, heads, chunk)

    ops.stage = disturbed
    assert [line.split(":")[0] for line in run_selftest(engine).failures] == ["stream = steps"]


@pytest.mark.parametrize("max_ctx", [1, 2, 64])
def test_the_smallest_pools_start_and_serve(start: Start, max_ctx: int) -> None:
    engine = start(max_ctx=max_ctx, max_slots=3, kv_pages=1, selftest=True)
    slot = scenarios.open_slot(engine, [])
    scenarios.step(engine, [(slot, 3)])
    assert engine.stats()["kv_pages_used"] == 1


def test_the_fingerprint_names_numerics_dtype_and_weights(start: Start) -> None:
    fingerprints = {
        start(**changes).info.fingerprint
        for changes in ({}, {"numerics": "landed"}, {"dtype": "float32"}, {"seed": 1}, {})
    }
    assert len(fingerprints) == 4


def test_the_fingerprint_names_the_arithmetic_version_and_the_config(
    start: Start, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {start().info.fingerprint}
    found.add(start(model_dir=write_config(rms_norm_eps=1e-5)).info.fingerprint)
    monkeypatch.setattr(backend, "ARITHMETIC_VERSION", ARITHMETIC_VERSION + 1)
    found.add(start().info.fingerprint)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"weights": "checkpoint"}, CheckpointError, "neither model.safetensors nor"),
        ({"max_ctx": 5000}, StartError, "max_ctx is 5000"),
    ],
    ids=["checkpoint", "max_ctx"],
)
def test_what_cannot_be_served_is_refused_before_a_device_is_looked_for(
    start: Start, changes: dict[str, object], error: type[Exception], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def choose(options: EngineOptions) -> None:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(backend, "choose_device", choose)
    with pytest.raises(error, match=words):
        start(device="cuda", **changes)


def test_the_report_tells_phases_and_sizes(start: Start) -> None:
    engine = start(max_slots=3)
    startup = engine.startup
    assert startup.device == engine.info.device == "cpu"
    assert startup.buckets == (1, 2, 3)
    assert startup.bytes_per_token == 2 * 576 * 2
    assert startup.slab_bytes == startup.kv_pages * 64 * startup.bytes_per_token
    assert list(startup.phases) == ["checkpoint", "weights", "buffers"]


def test_the_prompt_chunk_follows_the_device_unless_it_is_given(start: Start) -> None:
    automatic, given = start(), start(prefill_chunk=7)
    assert (automatic.startup.prefill_chunk, automatic.scheduler.prefill_chunk) == (32, 32)
    assert (given.startup.prefill_chunk, given.scheduler.prefill_chunk) == (7, 7)


def test_the_prefix_cache_starts_empty_behind_the_self_test_and_can_be_left_out(
    start: Start, tiny_dir: Path
) -> None:
    engine = start(prefix_cache=True, selftest=True)
    assert engine.stats()["kv_pages_cached"] == engine.stats()["prefix_queries"] == 0
    assert engine.sharing.cache is not None
    assert start(prefix_cache=False).sharing.cache is None
    assert EngineOptions(tiny_dir).prefix_cache


def test_options_for_a_device_are_a_new_value(tiny_dir: Path) -> None:
    options = EngineOptions(tiny_dir)
    assert [options.for_device(name).prefill_chunk for name in ("cuda", "cpu")] == [512, 32]
    assert options.prefill_chunk == 0
    assert [options.for_device(name).prefill_rows for name in ("cuda", "cpu")] == [128, 32]
    given = replace(options, prefill_chunk=100, prefill_rows=50)
    assert given.for_device("cpu") == given
    assert replace(given, prefill_rows=200).for_device("cpu").prefill_rows == 100


def test_options_are_never_changed(tiny_dir: Path) -> None:
    options = EngineOptions(tiny_dir)
    with pytest.raises(AttributeError):
        options.max_ctx = 1  # type: ignore[misc]
    assert replace(options, max_slots=128).buckets == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
    assert replace(options, max_slots=40).buckets == (1, 2, 4, 8, 16, 32, 40)


def test_a_pool_that_the_host_cannot_map_is_refused(start: Start) -> None:
    with pytest.raises(StartError, match="lower kv_pages"):
        start(kv_pages=2**31 - 1)
