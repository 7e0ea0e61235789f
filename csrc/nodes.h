// The nodes of a program: one kernel call each, cut among threads.
#pragma once

#include <memory>
#include <vector>

#include "program.h"

namespace eyas {

using WeightPtr = std::shared_ptr<PackedWeight>;

// ids: index of the token ids among a replay's integer inputs. The table holds the ids from `first`
// on; others give zeros.
std::unique_ptr<Node> embed_node(WeightPtr table, int ids, int64_t first, View out);
// x at quant buffer `quant` if the weight wants int8, else at `x`. accumulate: out += result.
std::unique_ptr<Node> linear_node(WeightPtr weight, View x, int quant, View out, bool accumulate);
// quant -1: not wanted.
std::unique_ptr<Node> norm_node(std::vector<float> weight, float eps, View x, View out, int quant);
std::unique_ptr<Node> quantise_node(View x, int quant);
std::unique_ptr<Node> silu_mul_node(View gate_up, View out, int quant);
std::unique_ptr<Node> add_node(View x, View y, View out);
// Each row of x times its factor, one column.
std::unique_ptr<Node> scale_rows_node(View x, View factor, View out);
std::unique_ptr<Node> copy_node(View x, View out);
// Cosines and sines [num_rows, size] of float32(position * frequency).
std::unique_ptr<Node> angles_node(std::vector<float> frequencies, int positions, View cos, View sin);
std::unique_ptr<Node> rope_node(View x, View out, View cos, View sin, int64_t head_dim,
                                bool interleaved);

// plan, cache: indices among a replay's plans and caches.
struct AttentionRef {
  int plan;
  int cache;
  int layer;
};
std::unique_ptr<Node> write_kv_node(AttentionRef ref, View k, View v);
std::unique_ptr<Node> attention_node(AttentionRef ref, View q, View out, float scale);
std::unique_ptr<Node> merge_node(AttentionRef ref, View out);

}  // namespace eyas
