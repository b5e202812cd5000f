"""The MoE half of a config.json: which layers route, over how many experts, and by what rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd.model.fields import CheckpointError
from latentd_kernels.moe import MAX_EXPERTS, MAX_TOP_K
from latentd_kernels.ops import RouterParams

if TYPE_CHECKING:
    from latentd.model.fields import Fields


@dataclass(frozen=True)
class MoeConfig:
    """The routed layers; all of them are alike. A shared expert of n times the routed inner size
    is the same sum as n shared experts of that size, and is held so."""

    num_experts: int
    inner: int  # moe_intermediate_size
    router: RouterParams
    has_bias: bool  # e_score_correction_bias enters the choice

    @property
    def stacked(self) -> int:
        """Experts in the stacked weights: the routed ones, then the shared."""
        return self.num_experts + self.router.num_shared

    @property
    def choices(self) -> int:
        """Experts that a row visits."""
        return self.router.top_k + self.router.num_shared


def read_moe(
    fields: Fields, model_type: str, layers: int
) -> tuple[MoeConfig | None, tuple[bool, ...]]:
    """The MoE settings (None if no layer routes) and, for each layer, whether it routes."""
    if not fields.has("n_routed_experts"):
        return None, (False,) * layers
    kinds = _layer_kinds(fields, model_type, layers)
    if not any(kinds):
        return None, kinds
    num_experts = fields.integer("n_routed_experts")
    num_shared = 0
    if fields.has("n_shared_experts"):
        num_shared = fields.integer("n_shared_experts", least=0)
    softmax = model_type == "deepseek_v2"
    router = (_read_v2 if softmax else _read_v3)(fields, num_experts, num_shared)
    inner = fields.integer("moe_intermediate_size")
    return MoeConfig(num_experts, inner, router, has_bias=not softmax), kinds


def _layer_kinds(fields: Fields, model_type: str, layers: int) -> tuple[bool, ...]:
    """GLM lists the kinds; elsewhere (and in GLM files without the list) the first k are dense,
    and of the others every moe_layer_freq-th routes."""
    if model_type == "glm4_moe_lite" and fields.has("mlp_layer_types"):
        kinds = fields.values["mlp_layer_types"]
        known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
        if not isinstance(kinds, list) or not known or len(kinds) != layers:
            raise fields.refuse("mlp_layer_types", f"dense or sparse for each of {layers} layers")
        return tuple(kind == "sparse" for kind in kinds)
    default = 1 if model_type == "glm4_moe_lite" else None
    first = fields.integer("first_k_dense_replace", default, least=0)
    step = fields.integer("moe_layer_freq", 1)
    return tuple(layer >= first and layer % step == 0 for layer in range(layers))


def _read_v2(fields: Fields, num_experts: int, num_shared: int) -> RouterParams:
    """Softmax scores, chosen greedily or within the best groups by their maximum; the weights are
    scaled and never renormalised (files that ask for both disagree between implementations)."""
    fields.choice("scoring_func", ("softmax",), "softmax")
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    fields.demand("norm_topk_prob", False)
    groups, top_groups = 1, 1
    if method == "group_limited_greedy":
        groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
    router = RouterParams(
        top_k=fields.integer("num_experts_per_tok"),
        scoring="softmax",
        num_groups=groups,
        top_groups=top_groups,
        group_score="max",
        normalize=False,
        scaling=fields.number("routed_scaling_factor"),
        num_shared=num_shared,
    )
    return _checked(router, num_experts)


def _read_v3(fields: Fields, num_experts: int, num_shared: int) -> RouterParams:
    """Sigmoid scores with a bias that enters the choice only, groups by the sum of their best
    two, renormalised if asked, always scaled."""
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    router = RouterParams(
        top_k=fields.integer("num_experts_per_tok"),
        scoring="sigmoid",
        num_groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        group_score="top2",
        normalize=fields.boolean("norm_topk_prob"),
        scaling=fields.number("routed_scaling_factor"),
        num_shared=num_shared,
    )
    return _checked(router, num_experts)


def _checked(router: RouterParams, num_experts: int) -> RouterParams:
    if num_experts > MAX_EXPERTS or router.top_k > MAX_TOP_K:
        raise CheckpointError(
            f"config.json: n_routed_experts {num_experts}, num_experts_per_tok {router.top_k}; "
            f"supported: up to {MAX_EXPERTS} and {MAX_TOP_K}"
        )
    groups, size = router.num_groups, num_experts // router.num_groups
    if num_experts % groups or router.top_groups > groups:
        raise CheckpointError(
            f"config.json: n_routed_experts {num_experts}, n_group {groups}, topk_group "
            f"{router.top_groups}; supported: equal groups, and at most as many chosen as there are"
        )
    if router.group_score == "top2" and groups > 1 and size < 2:
        raise CheckpointError(f"config.json: n_group {groups} leaves {size} expert a group, not 2")
    if router.top_k > router.top_groups * size:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {router.top_k} is more than the "
            f"{router.top_groups * size} experts of topk_group {router.top_groups} groups"
        )
    return router
