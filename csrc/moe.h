// Mixture of experts: which rows go to which experts, and the nodes that compute them.
//
// An assignment is one row at one of its top_k experts. Assignments are sorted by expert, so that
// an expert's weights are read once per step, and every one of them is computed as if alone.
#pragma once

#include <memory>
#include <vector>

#include "nodes.h"

namespace eyas {

// What the router's scores decide. Sigmoid: the row is multiplied by the score's sigmoid before the
// expert. Softmax: the expert's output is multiplied by the score's softmax, over all experts or
// over the chosen ones.
enum class Gating { SigmoidInput, SoftmaxAll, SoftmaxChosen };

// A step's assignments. One may serve every layer of a program: they run one after another.
struct Assignments {
  Assignments(int num_experts_, int top_k_, Gating gating_)
      : num_experts(num_experts_), top_k(top_k_), gating(gating_) {}
  Assignments(const Assignments&) = delete;
  void reserve(int64_t num_rows);

  const int num_experts;
  const int top_k;
  const Gating gating;
  // Of row t: entries t * top_k .. t * top_k + top_k - 1, by ascending expert.
  std::vector<int32_t> experts;
  std::vector<float> weights;
  std::vector<int32_t> places;  // in the order by expert
  // In the order by expert, rows ascending: entries of the lists above.
  std::vector<int32_t> sources;
  std::vector<int32_t> starts;  // [num_experts + 1]: where an expert's begin
  std::vector<int32_t> active;  // experts that have any
};

// Outputs offset .. of a linear layer.
struct LinearPart {
  WeightPtr weight;
  int64_t offset;
};
using LinearParts = std::vector<LinearPart>;

// Per expert: gate and up stacked, and down.
struct Experts {
  std::vector<LinearParts> gate_up, down;
  int64_t hidden_size;
  int64_t intermediate_size;
};

// Buffers that no other kind of node may use: they hold a row per assignment.
struct MoeBuffers {
  int rows;         // top_k * hidden_size wide
  int gate_up;      // top_k * 2 * intermediate_size
  int quant_rows;   // quantised twins, -1 where the weights don't want them
  int quant_gated;
};

// x, out: hidden_size wide; scores: one per expert. The nodes in the order in which they run.
std::vector<std::unique_ptr<Node>> moe_nodes(std::shared_ptr<Experts> experts,
                                             std::shared_ptr<Assignments> assignments, View x,
                                             View scores, View out, MoeBuffers buffers);

}  // namespace eyas
