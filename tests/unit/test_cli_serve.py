"""Commands against a real daemon process on the CPU backend, with a tiny random model."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gates import wait_until
from latentd.commands import bench_attend, latency
from latentd.commands.child import Child
from latentd.demo import model_dir
from latentd_client import Client, Control, CurveKeys, RequestRejected, protocol
from latentd_client.keys import write_pair
from processes import environment, latentd

pytest.importorskip("torch")

TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "eos_token_id": None,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
START_S = 120.0
Start = Callable[..., Child]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def start(folder: Path, tiny: Path, *flags: str) -> Child:
    folder.mkdir(exist_ok=True)
    model = ("--weights", "random", "--config", str(tiny), "--device", "cpu", "--max-slots", "4")
    return Child(folder, (*model, "--name", "tiny", "--max-ctx", "2048", *flags))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Child]:
    """A daemon that the tests share."""
    with start(tmp_path_factory.mktemp("daemon"), tiny) as child:
        child.wait_ready(START_S, lambda status: None)
        yield child


def test_the_summary_tells_what_is_served(daemon: Child) -> None:
    log = daemon.log.read_text()
    for part in (
        "model: tiny, 1 layers", "1152 bytes a token", "128 pages of 64 tokens", "buckets: 1 2 4",
        "prompts: 32 rows between two steps, 32 at a time while nobody decodes",
        "cpu (asked for)", "numerics f32", "self-test: ", "seconds: ", daemon.endpoint,
        protocol.control_endpoint(daemon.endpoint),
    ):  # fmt: skip
        assert part in log


def test_generate_streams_token_ids_to_stdout(daemon: Child) -> None:
    done = latentd(
        "generate", "--tokens", "1,2,3", "--ids", "--max-steps", "7", "--endpoint", daemon.endpoint
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 7


def test_generate_prints_the_same_tokens_from_drafts(daemon: Child) -> None:
    common = ("generate", "--tokens", "1,2,1,2,1", "--ids", "--max-steps", "20", "--endpoint")
    plain, drafted = latentd(*common, daemon.endpoint), latentd(*common, daemon.endpoint, "--draft")
    assert (drafted.returncode, drafted.stdout, drafted.stderr) == (0, plain.stdout, "")


def test_generate_takes_bytes_that_are_no_text(daemon: Child) -> None:
    common = ("generate", "--max-steps", "5", "--ids", "--endpoint", daemon.endpoint)
    named, raw = latentd(*common, "--tokens", "97,255"), latentd(*common, os.fsdecode(b"a\xff"))
    assert (raw.returncode, raw.stdout, raw.stderr) == (0, named.stdout, "")


def test_generate_takes_and_gives_the_text_of_a_tokenizer(daemon: Child, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    common = ("generate", "--max-steps", "9", "--endpoint", daemon.endpoint)
    ids = latentd(*common, "--ids", "--tokens", "7,8").stdout.split()
    done = latentd(*common, "w7 w8", "--tokenizer", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [f"w{number}" for number in ids]


def test_generate_names_a_tokenizer_that_is_not_there(daemon: Child, tmp_path: Path) -> None:
    common = ("generate", "text", "--endpoint", daemon.endpoint)
    done = latentd(*common, "--tokenizer", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot read {tmp_path}/tokenizer.json: No such file" in done.stderr


def test_generate_refuses_an_empty_prompt(daemon: Child) -> None:
    for prompt in (("",), ("--tokens", "")):
        done = latentd("generate", *prompt, "--endpoint", daemon.endpoint)
        assert (done.returncode, done.stdout) == (2, "")
        assert "the prompt is empty" in done.stderr


def test_generate_ends_before_a_stop_token(daemon: Child) -> None:
    common = ("generate", "--tokens", "1,2,3", "--ids", "--endpoint", daemon.endpoint)
    free = latentd(*common, "--max-steps", "9").stdout.split()
    stop = free[4]
    stopped = latentd(*common, "--max-steps", "9", "--stop", stop).stdout.split()
    assert stopped == free[: free.index(stop)]


def test_generate_with_a_seed_gives_the_same_text_again(daemon: Child) -> None:
    args = ("generate", "abc", "--temperature", "1", "--seed", "5", "--endpoint", daemon.endpoint)
    first, second = latentd(*args, "--max-steps", "20"), latentd(*args, "--max-steps", "20")
    assert first.returncode == 0
    assert first.stdout == second.stdout != "\n"


def test_a_refusal_of_the_daemon_is_one_line_and_exit_code_1(daemon: Child) -> None:
    done = latentd("generate", "--tokens", "999", "--endpoint", daemon.endpoint)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "999" in done.stderr


def test_status_shows_slots_pages_and_steps(daemon: Child) -> None:
    with Client(daemon.endpoint) as client, client.open([1, 2]) as slot:
        slot.step()
        done = latentd("status", "--endpoint", daemon.endpoint)
    assert done.returncode == 0, done.stderr
    assert "ready, up " in done.stdout
    assert "slots   1 of 4 in use" in done.stdout
    assert "pages   1 of 128 in use" in done.stdout


def test_status_prints_json(daemon: Child) -> None:
    report = json.loads(latentd("status", "--json", "--endpoint", daemon.endpoint).stdout)
    assert report["health"]["state"] == "ready"
    assert report["stats"]["kv_pages_total"] == 128


def test_bench_steps_measures_every_case(daemon: Child) -> None:
    done = latentd(
        "bench", "steps", "--steps", "30", "--seconds", "5", "--json", "--endpoint", daemon.endpoint
    )
    assert done.returncode == 0, done.stderr
    cases = {case["case"]: case for case in json.loads(done.stdout)["cases"]}
    assert set(cases) == {
        "step, 1 slot", "step, 2 slots in one request", "step, 4 slots in one request",
        "step, 1 slot, 2 clients", "step, 1 slot, 4 clients",
        "stream, 1 slot", "stream, 1 slot, 2 clients", "stream, 1 slot, 4 clients",
    }  # fmt: skip
    for case in cases.values():
        assert 0 < case["p50_us"] <= case["p90_us"] <= case["p99_us"]
        assert case["tokens_per_s"] > 0
    assert cases["step, 1 slot, 2 clients"]["device_us"] is None


def test_bench_attend_measures_every_case(daemon: Child) -> None:
    done = latentd(
        "bench", "attend", "--steps", "20", "--seconds", "5", "--context", "70", "--json",
        "--endpoint", daemon.endpoint,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert [case["rows"] for case in cases] == [1, 2, 4]
    for case in cases:
        assert 0 < case["p50_us"] <= case["p90_us"] <= case["p99_us"]
        assert case["p50_us"] <= case["token_us"]


def test_the_device_time_of_attention_is_of_its_own_case(
    daemon: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = argparse.Namespace(context=4, steps=2, seconds=10.0)
    with Client(daemon.endpoint) as client:
        bench_attend.measure(client, 1, args)
        measured = bench_attend.measure(client, 1, args)
        assert measured.device_us is None
        monkeypatch.setattr(bench_attend, "RING_STEPS", 9)  # as if it looked back on no more
        measured = bench_attend.measure(client, 1, args)
        assert measured.device_us is not None


def test_the_device_time_of_a_case_is_of_its_own_steps(
    daemon: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = latency.Case("step", 1, 1, context=4, steps=30, seconds=10.0)
    latency.measure(daemon.endpoint, short)
    measured = latency.measure(daemon.endpoint, short)
    assert (measured.device_us, measured.over_device_us) == (None, None)
    monkeypatch.setattr(latency, "RING_STEPS", 30)  # as if the daemon looked back on no more
    measured = latency.measure(daemon.endpoint, short)
    assert measured.device_us is not None


def test_what_a_request_takes_beyond_the_device_is_of_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a short case the device's median has the warm-up's steps in it, and may be above p50."""
    looks = iter([(0, None), (26, 8990.0)])
    monkeypatch.setattr(latency, "_device", lambda *args: next(looks))
    monkeypatch.setattr(latency, "_run", lambda *args: ([9000.0] * 20, [1000.0] * 6, 0.006))
    measured = latency.measure("", latency.Case("step", 1, 1, context=4, steps=6, seconds=1.0))
    assert (measured.p50_us, measured.over_device_us) == (1000.0, 10.0)


def test_check_prints_the_memory_plan(tiny: Path) -> None:
    flags = ("--weights", "random", "--config", str(tiny), "--max-ctx", "2048", "--max-slots", "4")
    done = latentd("check", *flags, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("1 layers", "1152 bytes of cache", "128 pages of 64 tokens", "total"):
        assert part in done.stdout


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_check_plans_for_the_device_that_is_asked_for(tiny: Path, device: str) -> None:
    flags = ("--weights", "random", "--config", str(tiny), "--max-ctx", "2048", "--max-slots", "4")
    done = latentd("check", *flags, "--device", device)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\non {device}:\n" in done.stdout


def test_check_refuses_a_pool_that_cannot_hold_one_slot(tiny: Path) -> None:
    flags = ("--weights", "random", "--config", str(tiny), "--max-ctx", "2048", "--kv-pages", "31")
    done = latentd("check", *flags, "--device", "cpu")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "31 pages" in done.stderr


def test_selftest_reports_what_it_compared(tiny: Path) -> None:
    flags = ("--weights", "random", "--config", str(tiny), "--max-slots", "4", "--device", "cpu")
    done = latentd("selftest", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 rows have the same bits alone and in batches of 1, 2, 4\n" in done.stdout
    assert "page order: the same bits on " in done.stdout
    assert done.stdout.splitlines()[-1] == "self-test on cpu passed: all 5 checks"


def test_a_daemon_ends_with_the_process_that_started_it(tmp_path: Path, tiny: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from latentd.commands.child import Child\n"
        "child = Child(Path(sys.argv[1]), sys.argv[2:]); print(child.process.pid, flush=True)\n"
        "child.wait_ready(120, lambda status: None); print('ready', flush=True); time.sleep(600)"
    )
    flags = ("--weights", "random", "--config", str(tiny), "--max-slots", "1", "--device", "cpu")
    command = [sys.executable, "-c", script, str(tmp_path), *flags]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
    wait_until(lambda: not (tmp_path / "latentd.sock").exists())
    wait_until(lambda: not Path(f"/proc/{pid}/fd").exists() or not os.listdir(f"/proc/{pid}/fd"))


def test_a_second_daemon_on_the_path_is_refused_before_it_loads(daemon: Child) -> None:
    done = latentd("serve", "--model", "/nonexistent", "--endpoint", daemon.endpoint)
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert str(daemon.process.pid) in done.stderr


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_float32_on_the_cpu_serves_the_bundled_model(tmp_path: Path, numerics: str) -> None:
    flags = ("--device", "cpu", "--dtype", "float32", "--numerics", numerics, "--max-slots", "2")
    with Child(tmp_path, ("--model", str(model_dir()), *flags)) as child:
        child.wait_ready(START_S, lambda status: None)
        with Client(child.endpoint) as client:
            assert (client.info.dtype, client.info.numerics) == ("float32", numerics)
            slot = client.open(list(b"In the beginning "))
            tokens = [slot.token, *(step.token for step in slot.stream(max_steps=10))]
            assert b"of the" in bytes(token for token in tokens if token is not None)
        assert child.stop() == 0


def test_sighup_reads_the_log_level_again(tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "latentd.toml"
    file.write_text("log_level = 'info'\n")
    with start(tmp_path / "run", tiny, "--config-file", str(file)) as child:
        child.wait_ready(START_S, lambda status: None)
        file.write_text("log_level = 'debug'\ndrain_s = 1.5\nspin_us = 9\n")
        child.process.send_signal(signal.SIGHUP)
        reloaded = "reloaded: drain_s 1.5, log_level debug"
        wait_until(lambda: reloaded in child.log.read_text())
        assert "spin_us has changed; a restart is needed" in child.log.read_text()
        file.write_text("log_level = 'loud'\n")
        child.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "log_level = 'loud'" in child.log.read_text())
        assert child.stop() == 0


def test_sigterm_lets_a_stream_end_and_refuses_new_work(tmp_path: Path, tiny: Path) -> None:
    with start(tmp_path / "run", tiny, "--drain-s", "3") as child:
        child.wait_ready(START_S, lambda status: None)
        with Client(child.endpoint) as client, Control(client.info.control) as control:
            slot, idle = client.open([1, 2, 3]), client.open([4])
            stream = slot.stream(max_steps=2000, credit=2)
            next(stream)
            child.process.send_signal(signal.SIGTERM)
            wait_until(lambda: control.health()["state"] == "draining")
            with pytest.raises(RequestRejected) as refusal:
                idle.step()
            assert refusal.value.code == "draining"
            assert [next(stream).context_len for _ in range(5)] == [5, 6, 7, 8, 9]
            assert child.process.wait(60) == 0
            with pytest.raises(RequestRejected, match="draining"):
                list(stream)
            assert slot.context_len < 2003
        assert not Path(child.endpoint.removeprefix("ipc://")).exists()


def test_a_second_sigterm_ends_a_drain_at_once(tmp_path: Path, tiny: Path) -> None:
    with start(tmp_path / "run", tiny, "--drain-s", "600") as child:
        child.wait_ready(START_S, lambda status: None)
        with Client(child.endpoint) as client, Control(client.info.control) as control:
            stream = client.open([1, 2, 3]).stream(max_steps=2000, credit=1)
            next(stream)
            child.process.send_signal(signal.SIGTERM)
            wait_until(lambda: control.health()["state"] == "draining")
            child.process.send_signal(signal.SIGTERM)
            assert child.process.wait(60) == 0


def test_sigterm_while_loading_ends_the_start(tmp_path: Path, tiny: Path) -> None:
    with start(tmp_path / "run", tiny) as child:
        wait_until(lambda: "device: cpu" in child.log.read_text())
        assert child.stop() == 0


def test_the_keys_that_may_connect_are_read_again_on_sighup(tmp_path: Path, tiny: Path) -> None:
    daemons, own = (write_pair(tmp_path / name) for name in ("server", "client"))
    clients, keys = tmp_path / "clients", CurveKeys(own, daemons.public)
    clients.write_text(f"{own.public} alice\n")
    flags = "--endpoint", "tcp://127.0.0.1:0", "--curve-key", str(tmp_path / "server")
    with start(tmp_path / "run", tiny, *flags, "--curve-clients", str(clients)) as child:
        child.wait_ready(START_S, lambda status: None)
        found = re.search(r"tcp://127\.0\.0\.1:\d+", child.log.read_text())
        assert found is not None
        with Client(found[0], keys=keys) as client:
            client.open([1]).step()

        def reload(content: str, told: str) -> None:
            clients.write_text(content)
            child.process.send_signal(signal.SIGHUP)
            wait_until(lambda: told in child.log.read_text())

        reload("nonsense\n", "reload failed, the old")
        assert "reloaded: " not in child.log.read_text()
        Client(found[0], keys=keys).close()
        reload("", "reloaded: ")
        with pytest.raises(RequestRejected, match="curve_clients"):
            Client(found[0], keys=keys)
        log = child.log.read_text()
        assert own.secret not in log
        assert daemons.secret not in log


def test_other_machines_are_not_served_without_curve(tiny: Path) -> None:
    done = latentd(
        "serve", "--weights", "random", "--config", str(tiny), "--device", "cpu",
        "--endpoint", "tcp://0.0.0.0:0",
    )  # fmt: skip
    assert done.returncode == 78
    assert "latentd keygen" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_path_for_both_endpoints_is_refused_before_loading(tmp_path: Path, tiny: Path) -> None:
    endpoint = f"ipc://{tmp_path}/d.sock"
    done = latentd(
        "serve", "--weights", "random", "--config", str(tiny), "--device", "cpu",
        "--endpoint", endpoint, "--control-endpoint", endpoint,
    )  # fmt: skip
    assert done.returncode == 78
    assert "are both" in done.stderr
    assert done.stderr.count("\n") == 1
