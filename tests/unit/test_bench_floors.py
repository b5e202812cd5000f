import pytest
import torch

from latentd.bench import floors
from latentd.bench.presets import PRESETS, read_config
from latentd.bench.shapes import matrices
from latentd.model import weights
from latentd.model.weights import DenseWeights


@pytest.mark.parametrize("name", PRESETS)
def test_the_fixed_bytes_are_all_weights_but_experts_and_embedding(name: str) -> None:
    config = read_config(name)
    made = weights.allocate(config, torch.device("meta"))
    left_out = [made.embed]
    for layer in made.layers:
        if not isinstance(layer.mlp, DenseWeights):
            left_out += [layer.mlp.gate_up, layer.mlp.down]
    ids = {id(tensor) for tensor in left_out}
    kept = sum(t.nbytes for t in weights.tensors(made) if id(t) not in ids)
    assert floors.fixed_bytes(config) == kept


def test_one_row_of_v2_lite_at_1k_has_the_known_floor() -> None:
    config = read_config("v2-lite")
    visits = 26 * (6 + 2)
    num_bytes = floors.step_bytes(config, 1, 1024, visits)
    assert floors.floor_us(num_bytes, 4.2e12) == pytest.approx(1170, rel=0.01)


def test_a_row_more_costs_its_cache_its_experts_and_its_embedding() -> None:
    config = read_config("v2-lite")
    one, two = (floors.step_bytes(config, rows, 8192, 208 * rows) for rows in (1, 2))
    cache = 8192 * 576 * 2 * 27
    assert two - one == cache + 208 * 3 * 1408 * 2048 * 2 + 2048 * 2
    assert floors.cache_bytes(1, 8192, 27) == cache


def test_the_attention_floor_is_the_cache_and_kv_b_once() -> None:
    assert floors.attention_bytes(16, 128, 128, 8, 1024) == 8 * 1024 * 1152 + 4096 * 512 * 2
    assert floors.attention_bytes(20, 192, 256, 1, 64) == 64 * 1152 + 8960 * 512 * 2


def test_the_linears_of_v2_lite_are_those_of_its_checkpoint() -> None:
    found = {
        matrix.name: (matrix.features, matrix.k, matrix.form, count)
        for matrix, count in matrices(read_config("v2-lite")).items()
    }
    assert found == {
        "qkv_a": (3648, 2048, "bf16", 27),
        "o": (2048, 2048, "add", 27),
        "gate_up": (21888, 2048, "gated", 1),
        "down": (2048, 10944, "add", 1),
        "router": (64, 2048, "f32", 26),
        "head": (102400, 2048, "f32", 1),
    }


def test_a_query_rank_adds_a_second_projection() -> None:
    names = {matrix.name: matrix for matrix in matrices(read_config("v3"))}
    assert (names["qkv_a"].features, names["qkv_a"].k) == (1536 + 576, 7168)
    assert (names["q_b"].features, names["q_b"].k) == (128 * 192, 1536)
