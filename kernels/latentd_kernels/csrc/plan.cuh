// The plan of a MoE layer's expert products: written by moe_route or moe_plan, read by the products.
#pragma once
#include "common.cuh"

// The plan (moe_plan_ints in moe_workspace.py): the number of active experts, their ids in rising order, where the
// entries of each start, and the entries row * choices + choice, in rising order within an expert.
struct Plan {
  int* base;
  int total_experts;
  LATENTD_DEVICE int& num_active() const { return base[0]; }
  LATENTD_DEVICE int& active(int i) const { return base[4 + i]; }
  LATENTD_DEVICE int& start(int i) const { return base[4 + total_experts + i]; }
  LATENTD_DEVICE int& entry(int i) const { return base[5 + 2 * total_experts + i]; }
};
