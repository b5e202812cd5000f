"""The bundled demo model: what ships, what it promises in its config, and that it was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from latentd import demo

WEIGHTS_LIMIT = 20_000_000  # bytes
RUTH = (  # Ruth 1:16, a book that was held out of the training text
    "And Ruth said, Intreat me not to leave thee, or to return from following after thee: for "
    "whither thou goest, I will go; and where thou lodgest, I will lodge: thy people shall be my "
    "people, and thy God my God:"
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((demo.model_dir() / "report.json").read_text())
    return content


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((demo.model_dir() / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def model() -> Any:
    source: Any = AutoModelForCausalLM  # its stub does not know of output_loading_info
    loaded, info = source.from_pretrained(
        demo.model_dir(), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return loaded.eval()


def test_the_weights_stay_within_twenty_megabytes() -> None:
    assert (demo.model_dir() / "model.safetensors").stat().st_size <= WEIGHTS_LIMIT


def test_the_config_is_the_one_the_training_script_writes(config: dict[str, Any]) -> None:
    from latentd.demo.architecture import CONFIG

    assert config == CONFIG


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("vocab_size", 256),
        ("num_hidden_layers", 4),
        ("first_k_dense_replace", 1),
        ("hidden_size", 256),
        ("num_attention_heads", 4),
        ("q_lora_rank", None),
        ("kv_lora_rank", 512),
        ("qk_nope_head_dim", 128),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 128),
        ("n_routed_experts", 8),
        ("num_experts_per_tok", 2),
        ("n_shared_experts", 1),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", True),
        ("tie_word_embeddings", False),
    ],
)
def test_the_config_promises(config: dict[str, Any], field: str, value: object) -> None:
    assert config[field] == value


def test_every_expert_is_a_tensor_of_its_own_in_bf16() -> None:
    with safe_open(demo.model_dir() / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in (1, 2, 3)
        for expert in range(8)
        for part in ("gate", "up", "down")
    }
    assert experts == {name for name in dtypes if ".experts." in name}
    wide = {name for name, dtype in dtypes.items() if dtype != "BF16"}
    assert wide == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)}


def test_every_input_width_of_a_linear_is_a_multiple_of_32() -> None:
    with safe_open(demo.model_dir() / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert all(shape[-1] % 32 == 0 for shape in shapes.values() if len(shape) == 2)


def test_the_report_speaks_of_the_weights_that_ship(report: dict[str, Any]) -> None:
    assert report["weights_bytes"] == (demo.model_dir() / "model.safetensors").stat().st_size


def test_a_held_out_sentence_is_scored_as_the_report_says(
    model: Any, report: dict[str, Any]
) -> None:
    ids = torch.tensor([demo.encode(RUTH)])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # One sentence without context before it: far from the mean, but far better than 1.6 (a model
    # half trained) or 5.5 (no model).
    assert loss < report["validation_nats_per_byte"]["king_james"] + 0.35


def test_every_expert_takes_a_share_of_the_work(report: dict[str, Any]) -> None:
    assert all(0.08 < share < 0.17 for layer in report["expert_loads"] for share in layer)


def test_a_sample_reads_like_the_text(model: Any) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([demo.encode(demo.DEFAULT_PROMPT)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=80,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        pad_token_id=0,
    )
    words = demo.decode(out[0, ids.shape[1] :].tolist()).replace("\0", " ").split()
    plain = [word for word in words if word.strip(".,;:?!()[]'-").replace("'", "").isalpha()]
    assert len(words) > 8
    assert len(plain) > 0.9 * len(words)
    assert {"the", "and", "of", "to", "that", "unto"} & {word.lower() for word in words}


def test_text_survives_encoding_and_decoding() -> None:
    assert demo.decode(demo.encode("thou, naïve 王")) == "thou, naïve 王"


def test_bytes_that_are_no_text_decode_to_the_replacement_character() -> None:
    assert demo.decode([65, 0xFF, 66]) == "A\N{REPLACEMENT CHARACTER}B"


def test_an_id_that_is_no_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        demo.decode([256])


def test_the_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import latentd.demo"
    subprocess.run([sys.executable, "-c", code], check=True)
