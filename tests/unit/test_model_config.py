from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from latentd.model.config import CheckpointError, ModelConfig
from latentd.model.published import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GLM_4_7_FLASH,
    KIMI_K2,
    MOONLIGHT,
    unquantised,
)

if TYPE_CHECKING:
    from pathlib import Path

V3 = unquantised(DEEPSEEK_V3)
K2 = unquantised(KIMI_K2)


def k2_long() -> dict[str, Any]:
    return K2 | {
        "rope_scaling": K2["rope_scaling"] | {"factor": 64},
        "max_position_embeddings": 262144,
    }


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        pytest.param(DEEPSEEK_V2_LITE, 0.1147213868, id="v2-lite"),
        pytest.param(V3, 0.1352337788, id="v3"),
        pytest.param(k2_long(), 0.1446796258, id="kimi-k2-64x"),
        pytest.param(MOONLIGHT, 0.0721687836, id="moonlight"),
        pytest.param(GLM_4_7_FLASH, 256**-0.5, id="glm"),
    ],
)
def test_softmax_scale_uses_the_width_before_absorption_and_the_yarn_factor(
    values: dict[str, Any], scale: float
) -> None:
    assert ModelConfig.from_dict(values).softmax_scale == pytest.approx(scale, abs=1e-10)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        pytest.param(DEEPSEEK_V2_LITE, (27, 16, None, 128, 128, 64, 6, 2, 1, 1), id="v2-lite"),
        pytest.param(DEEPSEEK_V2, (60, 128, 1536, 128, 128, 160, 6, 2, 8, 3), id="v2"),
        pytest.param(V3, (61, 128, 1536, 128, 128, 256, 8, 1, 8, 4), id="v3"),
        pytest.param(K2, (61, 64, 1536, 128, 128, 384, 8, 1, 1, 1), id="kimi-k2"),
        pytest.param(MOONLIGHT, (27, 16, None, 128, 128, 64, 6, 2, 1, 1), id="moonlight"),
        pytest.param(GLM_4_7_FLASH, (47, 20, 768, 192, 256, 64, 4, 1, 1, 1), id="glm"),
    ],
)
def test_published_configs_are_read(values: dict[str, Any], shape: tuple[int | None, ...]) -> None:
    config = ModelConfig.from_dict(values)
    assert config.moe is not None
    router = config.moe.router
    assert shape == (
        config.num_layers, config.num_heads, config.q_lora_rank, config.nope_dim, config.v_dim,
        config.moe.num_experts, router.top_k, router.num_shared, router.num_groups,
        router.top_groups,
    )  # fmt: skip


def test_v2_lite_routes_greedily_by_unnormalised_softmax() -> None:
    config = ModelConfig.from_dict(DEEPSEEK_V2_LITE)
    assert config.moe is not None
    router = config.moe.router
    assert (router.scoring, router.normalize, router.scaling) == ("softmax", False, 1.0)
    assert not config.moe.has_bias


def test_v2_limits_groups_by_their_maximum_and_scales() -> None:
    config = ModelConfig.from_dict(DEEPSEEK_V2)
    assert config.moe is not None
    router = config.moe.router
    assert (router.group_score, router.normalize, router.scaling) == ("max", False, 16.0)


def test_v2_ignores_groups_when_it_chooses_greedily() -> None:
    config = ModelConfig.from_dict(DEEPSEEK_V2 | {"topk_method": "greedy"})
    assert config.moe is not None
    assert (config.moe.router.num_groups, config.moe.router.top_groups) == (1, 1)


def test_v3_routes_by_biased_sigmoid_and_the_sum_of_two() -> None:
    config = ModelConfig.from_dict(V3)
    assert config.moe is not None
    router = config.moe.router
    assert (router.scoring, router.group_score) == ("sigmoid", "top2")
    assert (router.normalize, router.scaling) == (True, 2.5)
    assert config.moe.has_bias


def test_first_layers_are_dense() -> None:
    assert ModelConfig.from_dict(V3).moe_layers == (False,) * 3 + (True,) * 58


def test_glm_lists_its_layers() -> None:
    kinds = ["dense", "sparse", "dense"]
    values = GLM_4_7_FLASH | {"num_hidden_layers": 3, "mlp_layer_types": kinds}
    assert ModelConfig.from_dict(values).moe_layers == (False, True, False)


def test_glm_without_a_list_has_one_dense_layer() -> None:
    values = {k: v for k, v in GLM_4_7_FLASH.items() if k != "first_k_dense_replace"}
    assert ModelConfig.from_dict(values).moe_layers == (False,) + (True,) * 46


def test_model_without_experts_is_dense() -> None:
    config = ModelConfig.from_dict(V3 | {"n_routed_experts": None})
    assert config.moe is None
    assert not any(config.moe_layers)


def test_both_rope_spellings_mean_the_same() -> None:
    scaling = dict(V3["rope_scaling"])
    parameters = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": 10000.0}
    saved = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")}
    assert ModelConfig.from_dict(saved | {"rope_parameters": parameters}) == (
        ModelConfig.from_dict(V3)
    )


def test_magnitude_is_one_where_both_mscales_agree() -> None:
    assert ModelConfig.from_dict(V3).rope.magnitude == 1.0
    assert ModelConfig.from_dict(GLM_4_7_FLASH).rope.magnitude == 1.0


def test_mscale_without_mscale_all_dim_scales_the_rotation_only() -> None:
    scaling = V3["rope_scaling"] | {"mscale_all_dim": 0}
    config = ModelConfig.from_dict(V3 | {"rope_scaling": scaling})
    assert config.rope.magnitude == pytest.approx(1.3688879454)
    assert config.rope.score_factor == 1.0


@pytest.mark.parametrize(
    ("eos", "generation", "ids"),
    [
        pytest.param(1, None, (1,), id="number"),
        pytest.param([5, 6], None, (5, 6), id="list"),
        pytest.param(None, None, (), id="null"),
        pytest.param(1, {"eos_token_id": [7, 8]}, (7, 8), id="generation-config"),
        pytest.param(1, {"temperature": 0.6}, (1,), id="generation-config-is-silent"),
    ],
)
def test_stop_tokens_come_from_either_file(
    eos: object, generation: dict[str, object] | None, ids: tuple[int, ...]
) -> None:
    assert ModelConfig.from_dict(V3 | {"eos_token_id": eos}, generation).eos_token_ids == ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"model_type": "llama"}, ("model_type", "llama", "deepseek_v3"), id="type"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8"}},
            ("quantization_config", "fp8", "bfloat16"),
            id="quantised",
        ),
        pytest.param({"kv_lora_rank": 256}, ("kv_lora_rank", "256", "512"), id="latent"),
        pytest.param({"qk_rope_head_dim": 32}, ("qk_rope_head_dim", "32", "64"), id="rope-dim"),
        pytest.param({"v_head_dim": 64}, ("v_head_dim", "(128, 64)", "(192, 256)"), id="v-dim"),
        pytest.param({"attention_bias": True}, ("attention_bias", "True", "False"), id="bias"),
        pytest.param({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu"), id="activation"),
        pytest.param({"hidden_size": 7160}, ("hidden_size", "7160", "32"), id="hidden"),
        pytest.param({"moe_intermediate_size": 40}, ("moe_intermediate_size", "40"), id="inner"),
        pytest.param(
            {"num_attention_heads": 256, "num_key_value_heads": 256},
            ("num_attention_heads", "256", "128"),
            id="heads",
        ),
        pytest.param({"num_key_value_heads": 8}, ("num_key_value_heads", "8", "128"), id="gqa"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2}}, ("type", "linear", "yarn"), id="rope"
        ),
        pytest.param({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5"), id="part"),
        pytest.param({"scoring_func": "softmax"}, ("scoring_func", "softmax"), id="scoring"),
        pytest.param({"topk_method": "greedy"}, ("topk_method", "greedy"), id="method"),
        pytest.param({"n_group": 7}, ("n_group", "7"), id="groups"),
        pytest.param({"n_routed_experts": 512}, ("n_routed_experts", "512", "384"), id="experts"),
        pytest.param({"vocab_size": None}, ("vocab_size", "missing"), id="missing"),
        pytest.param({"vocab_size": True}, ("vocab_size", "True"), id="boolean"),
        pytest.param({"rms_norm_eps": 0}, ("rms_norm_eps", "0"), id="zero"),
        pytest.param({"eos_token_id": "</s>"}, ("eos_token_id", "</s>"), id="eos"),
    ],
)
def test_unsupported_config_is_refused_by_name(
    change: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(V3 | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_v2_with_renormalised_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match="norm_topk_prob is True; supported: False"):
        ModelConfig.from_dict(DEEPSEEK_V2 | {"norm_topk_prob": True})


@pytest.mark.parametrize("values", [DEEPSEEK_V3, KIMI_K2], ids=["v3", "kimi-k2"])
def test_published_fp8_checkpoints_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization_config with quant_method 'fp8'"):
        ModelConfig.from_dict(values)


def test_config_is_read_from_a_directory_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOONLIGHT))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[]", "not a JSON object"),
     (None, "No such")],
    ids=["broken", "nested", "a list", "missing"],
)  # fmt: skip
def test_unreadable_config_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dir(tmp_path)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * 16)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file; name its directory"):
        ModelConfig.from_dir(file)


def test_an_absurd_number_of_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000; supported: 1 to"):
        ModelConfig.from_dict(MOONLIGHT | {"num_hidden_layers": 10**9})
