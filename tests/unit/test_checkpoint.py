from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from latentd import weight_stream
from latentd.checkpoint import CheckpointError, inspect, load
from latentd.model.config import ModelConfig
from latentd.model.destinations import destinations
from latentd.model.random_weights import random_weights
from latentd.model.weights import MoeWeights, allocate, tensors, weight_bytes
from latentd.shards import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 1024,
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def random_tensors(values: dict[str, Any]) -> Tensors:
    config = ModelConfig.from_dict(values)
    places = destinations(config, allocate(config, torch.device("meta")))
    generator = torch.Generator().manual_seed(7)
    made = {n: torch.randn(p.shape, generator=generator).bfloat16() for n, p in places.items()}
    return {n: t.float() if n.endswith("_bias") else t for n, t in made.items()}


def write(path: Path, tensors: Tensors, values: dict[str, Any] = CONFIG) -> None:
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors")


def write_shards(path: Path, shards: list[Tensors], weight_map: dict[str, str]) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG))
    for number, shard in enumerate(shards):
        save_file(shard, path / f"part-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def split(tensors: Tensors) -> tuple[list[Tensors], dict[str, str]]:
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    shards = [{name: tensors[name] for name in half} for half in halves]
    return shards, {n: f"part-{k}.safetensors" for k, half in enumerate(halves) for n in half}


def load_cpu(path: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return load(path, ModelConfig.from_dir(path), CPU, dtype, **more)


def test_every_tensor_lands_in_its_place(tmp_path: Path) -> None:
    source = random_tensors(CONFIG)
    write(tmp_path, source)
    weights = load_cpu(tmp_path)
    first, second = weights.layers
    attention = "model.layers.0.self_attn."
    fused = [source[attention + "q_a_proj.weight"], source[attention + "kv_a_proj_with_mqa.weight"]]
    assert torch.equal(first.attention.qkv_a, torch.cat(fused).float())
    dense = [source[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up")]
    assert torch.equal(first.mlp.gate_up, torch.cat(dense).float())
    assert torch.equal(second.mlp.down[3], source[EXPERT].float())
    assert torch.equal(weights.head, source["lm_head.weight"].float())


def test_shared_expert_is_cut_into_experts_of_the_routed_size(tmp_path: Path) -> None:
    source = random_tensors(CONFIG)
    write(tmp_path, source)
    mlp = load_cpu(tmp_path).layers[1].mlp
    assert isinstance(mlp, MoeWeights)
    x, prefix = torch.randn(64), "model.layers.1.mlp.shared_experts."
    gate, up, down = (source[f"{prefix}{n}_proj.weight"].float() for n in ("gate", "up", "down"))
    whole = down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
    parts = []
    for gate_up, part_down in zip(mlp.gate_up[4:], mlp.down[4:], strict=True):
        g, u = (gate_up @ x).chunk(2)
        parts.append(part_down @ (torch.nn.functional.silu(g) * u))
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4)  # values of some hundreds


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    source = random_tensors(CONFIG)
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    write(one, source)
    write_shards(many, *split(source))
    a, b = load_cpu(one), load_cpu(many)
    assert a.content_hash == b.content_hash
    assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_content_hash_follows_every_value(tmp_path: Path) -> None:
    source = random_tensors(CONFIG)
    write(tmp_path, source)
    before = load_cpu(tmp_path).content_hash
    source[EXPERT][0, 0] += 1
    write(tmp_path, source)
    assert load_cpu(tmp_path).content_hash != before


def test_small_chunks_give_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, random_tensors(CONFIG))
    whole = load_cpu(tmp_path)
    monkeypatch.setattr(weight_stream, "CHUNK_BYTES", 1000)
    cut = load_cpu(tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(tensors(whole), tensors(cut), strict=True))


def test_values_are_read_in_place_from_the_map_of_their_file(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    file = tmp_path / "model.safetensors"
    (values,) = map_tensors(file, [EXPERT]).values()
    address = values.data_ptr()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(edge, 16) for edge in line.split(" ", 1)[0].split("-"))
        if first <= address < last:
            assert line.endswith(str(file)), "the values are a copy in host memory"
            return
    raise AssertionError("the values lie in no mapping")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    seen: list[tuple[int, int]] = []
    load_cpu(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (inspect(tmp_path).bytes_total,) * 2
    assert seen == sorted(seen)


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    values = CONFIG | {"tie_word_embeddings": True}
    write(tmp_path, random_tensors(values), values)
    weights = load_cpu(tmp_path)
    assert weights.head is weights.embed


def test_stored_copy_of_a_tied_head_is_skipped(tmp_path: Path) -> None:
    values = CONFIG | {"tie_word_embeddings": True}
    source = random_tensors(values)
    write(tmp_path, source, values)
    before = load_cpu(tmp_path).content_hash
    write(tmp_path, source | {HEAD: source[EMBED].clone()}, values)
    assert inspect(tmp_path).skipped == (HEAD,)
    assert load_cpu(tmp_path).content_hash == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda head: head + (torch.arange(64) == 63), id="values"),
        pytest.param(lambda head: head[:49], id="shape"),
        pytest.param(lambda head: head.float(), id="dtype"),
    ],
)
def test_tied_head_that_differs_from_the_embedding_is_refused(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    values = CONFIG | {"tie_word_embeddings": True}
    source = random_tensors(values)
    write(tmp_path, source | {HEAD: change(source[EMBED]).clone()}, values)
    with pytest.raises(CheckpointError, match=f"{HEAD}: not the same as {EMBED}"):
        inspect(tmp_path)


def test_prediction_layer_and_stored_frequencies_are_skipped(tmp_path: Path) -> None:
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(2, 2, dtype=torch.bfloat16),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.zeros(2, 2, dtype=torch.int8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32),
    }
    write(tmp_path, random_tensors(CONFIG) | extra)
    assert inspect(tmp_path).skipped == tuple(sorted(extra))


def replace_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda source: source | {name: tensor}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda source: {n: t for n, t in source.items() if n != EXPERT},
            (EXPERT, "missing"),
            id="missing",
        ),
        pytest.param(
            replace_tensor("model.layers.0.self_attn.q_proj.weight", torch.zeros(4).bfloat16()),
            ("model.layers.0.self_attn.q_proj.weight", "unexpected"),
            id="unexpected",
        ),
        pytest.param(
            replace_tensor("model.layers.4.input_layernorm.weight", torch.zeros(64).bfloat16()),
            ("model.layers.4.input_layernorm.weight", "unexpected"),
            id="layer-behind-the-prediction-layer",
        ),
        pytest.param(
            replace_tensor(EXPERT, torch.zeros(32, 64).bfloat16()),
            (EXPERT, "[32, 64]", "[64, 32]"),
            id="misshapen",
        ),
        pytest.param(
            replace_tensor(EXPERT, torch.zeros(64, 32).to(torch.float8_e4m3fn)),
            (EXPERT, "F8_E4M3", "BF16"),
            id="quantised",
        ),
        pytest.param(
            replace_tensor(EXPERT, torch.zeros(64, 32)), (EXPERT, "F32", "BF16"), id="float32"
        ),
        pytest.param(
            replace_tensor("model.norm.weight", torch.full((64,), 1.001)),
            ("model.norm.weight", "F32", "BF16 cannot hold"),
            id="inexact-norm",
        ),
    ],
)
def test_wrong_tensor_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], Tensors], words: tuple[str, ...]
) -> None:
    write(tmp_path, change(random_tensors(CONFIG)))
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wide_vectors_and_routers_are_taken_where_bf16_holds_them(tmp_path: Path) -> None:
    source = random_tensors(CONFIG)
    for name in ("model.norm.weight", "model.layers.1.mlp.gate.weight"):
        source[name] = source[name].float()
    write(tmp_path, source)
    assert torch.equal(load_cpu(tmp_path).norm, source["model.norm.weight"])


def test_float32_run_takes_float32_and_float16_exactly(tmp_path: Path) -> None:
    source = {n: t.float() * 1.001 for n, t in random_tensors(CONFIG).items()}
    source["model.norm.weight"] = source["model.norm.weight"].half()
    write(tmp_path, source)
    weights = load_cpu(tmp_path, torch.float32)
    assert torch.equal(weights.embed, source["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, source["model.norm.weight"].float())


@pytest.mark.parametrize("cut", [4, 60, 5000, -1], ids=["length", "header", "data", "last-byte"])
def test_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    write(tmp_path, random_tensors(CONFIG))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        inspect(tmp_path)


def test_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, damaged or no"):
        inspect(tmp_path)


def test_file_with_bytes_behind_its_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, damaged or no"):
        inspect(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards, weight_map = split(random_tensors(CONFIG))
    name = next(iter(shards[0]))
    shards[1][name] = shards[0][name]
    write_shards(tmp_path, shards, weight_map)
    with pytest.raises(CheckpointError, match=f"{name}: duplicated"):
        inspect(tmp_path)


def test_name_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    one = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = ("{" + one + "," + one + "}").encode()
    data = len(header).to_bytes(8, "little") + header + b"\0"
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="a is duplicated"):
        inspect(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(CONFIG))
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0\0"
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, damaged or no"):
        inspect(tmp_path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, *split(random_tensors(CONFIG)))
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: No such file"):
        inspect(tmp_path)


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    shards, weight_map = split(random_tensors(CONFIG))
    weight_map[EXPERT] = next(
        f for f in sorted(set(weight_map.values())) if f != weight_map[EXPERT]
    )
    write_shards(tmp_path, shards, weight_map)
    with pytest.raises(CheckpointError, match=f"{EXPERT}: .*holds it"):
        inspect(tmp_path)


def test_index_that_points_outside_the_directory_is_refused(tmp_path: Path) -> None:
    shards, weight_map = split(random_tensors(CONFIG))
    weight_map[EXPERT] = "../other.safetensors"
    write_shards(tmp_path, shards, weight_map)
    with pytest.raises(CheckpointError, match="no plain file name"):
        inspect(tmp_path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        inspect(tmp_path)


def test_weight_bytes_count_what_is_allocated() -> None:
    config = ModelConfig.from_dict(CONFIG)
    held = tensors(allocate(config, CPU))
    assert weight_bytes(config, CPU) == sum(t.numel() * t.itemsize for t in held)


def test_random_weights_repeat_and_are_bf16_values() -> None:
    config = ModelConfig.from_dict(CONFIG)
    a, b = (random_weights(config, CPU, torch.bfloat16, 3) for _ in range(2))
    assert a.content_hash == b.content_hash
    assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    assert all(torch.equal(x, x.bfloat16().float()) for x in tensors(a))
    assert a.content_hash != random_weights(config, CPU, torch.bfloat16, 4).content_hash
