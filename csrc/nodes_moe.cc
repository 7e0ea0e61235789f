#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "moe.h"
#include "node_parts.h"

namespace eyas {

void Assignments::reserve(int64_t num_rows) {
  const auto size = static_cast<size_t>(num_rows * top_k);
  if (size > experts.size()) {
    experts.resize(size);
    weights.resize(size);
    places.resize(size);
    sources.resize(size);
  }
  starts.resize(static_cast<size_t>(num_experts) + 1);
  active.reserve(static_cast<size_t>(num_experts));
}

namespace {

using AssignmentsPtr = std::shared_ptr<Assignments>;
using ExpertsPtr = std::shared_ptr<Experts>;

// A buffer of top_k * width columns, as top_k rows of `width` for each of its own.
Rows assignment_rows(const Step& step, int buffer, int64_t width) {
  Rows rows = step.rows({buffer, 0, width});
  rows.stride = width;
  return rows;
}
QuantRows assignment_quant_rows(const Step& step, int buffer, int64_t width) {
  QuantRows rows = step.quant_rows(buffer);
  rows.stride = width;
  rows.info_stride = width / GROUP;
  return rows;
}
Rows from_row(Rows rows, int64_t row) {
  rows.data += row * rows.stride;
  return rows;
}
QuantRows from_row(QuantRows rows, int64_t row) {
  rows.data += row * rows.stride;
  rows.info += row * rows.info_stride;
  return rows;
}

// The experts of the top_k greatest scores (of equal ones, the lowest), ascending, and their
// weights. A row that has a NaN among its scores gets weights of NaN, which its output then shows.
void choose(const Assignments& to, const float* scores, int32_t* experts, float* weights) {
  const int top_k = to.top_k;
  int count = 0;
  for (int e = 0; e < to.num_experts; ++e) {
    if (std::isnan(scores[e])) {
      for (int i = 0; i < top_k; ++i) {
        experts[i] = i;
        weights[i] = std::numeric_limits<float>::quiet_NaN();
      }
      return;
    }
    int at = count;
    while (at > 0 && scores[e] > scores[experts[at - 1]]) --at;
    if (at == top_k) continue;
    if (count < top_k) ++count;
    for (int i = count - 1; i > at; --i) experts[i] = experts[i - 1];
    experts[at] = e;
  }
  const double greatest = scores[experts[0]];
  std::sort(experts, experts + top_k);
  const auto power = [&](int e) { return std::exp(static_cast<double>(scores[e]) - greatest); };
  double total = 0;
  if (to.gating == Gating::SoftmaxAll)
    for (int e = 0; e < to.num_experts; ++e) total += power(e);
  if (to.gating == Gating::SoftmaxChosen)
    for (int i = 0; i < top_k; ++i) total += power(experts[i]);
  for (int i = 0; i < top_k; ++i)
    weights[i] = static_cast<float>(
        to.gating == Gating::SigmoidInput
            ? 1.0 / (1.0 + std::exp(-static_cast<double>(scores[experts[i]])))
            : power(experts[i]) / total);
}

class Route : public ByRows {
 public:
  Route(AssignmentsPtr assignments, View scores)
      : ByRows("route"), assignments_(std::move(assignments)), scores_(scores) {}
  void prepare(const Step& step) override { assignments_->reserve(step.num_rows); }
  void run_rows(const Step& step, Range range) const override {
    Assignments& to = *assignments_;
    const Rows scores = step.rows(scores_);
    for (int64_t row = range.begin; row < range.end; ++row)
      choose(to, scores.data + row * scores.stride, to.experts.data() + row * to.top_k,
             to.weights.data() + row * to.top_k);
  }

 private:
  AssignmentsPtr assignments_;
  View scores_;
};

// A counting sort by expert, on one thread.
class Group : public NotByRows {
 public:
  explicit Group(AssignmentsPtr assignments)
      : NotByRows("group"), assignments_(std::move(assignments)) {}
  void run(const Step& step, int thread) const override {
    if (thread != 0) return;
    Assignments& to = *assignments_;
    const auto size = static_cast<int32_t>(step.num_rows * to.top_k);
    int32_t* next = to.starts.data();  // of an expert: where its next assignment goes
    std::fill(to.starts.begin(), to.starts.end(), 0);
    for (int32_t i = 0; i < size; ++i) ++next[to.experts[static_cast<size_t>(i)] + 1];
    to.active.clear();
    for (int32_t e = 0; e < to.num_experts; ++e) {
      if (next[e + 1]) to.active.push_back(e);
      next[e + 1] += next[e];
    }
    for (int32_t i = 0; i < size; ++i) {
      const int32_t place = next[to.experts[static_cast<size_t>(i)]]++;
      to.places[static_cast<size_t>(i)] = place;
      to.sources[static_cast<size_t>(place)] = i;
    }
    // Each start has moved to the next one's place.
    for (int32_t e = to.num_experts; e > 0; --e) next[e] = next[e - 1];
    next[0] = 0;
  }

 private:
  AssignmentsPtr assignments_;
};

// Copies each assignment's row to its place, scaled or quantised as its expert wants it.
class Gather : public NotByRows {
 public:
  Gather(AssignmentsPtr assignments, View x, int out, int quant)
      : NotByRows("gather"),
        assignments_(std::move(assignments)),
        x_(x),
        out_(out),
        quant_(quant) {}
  void run(const Step& step, int thread) const override {
    const Assignments& from = *assignments_;
    const int64_t width = x_.width;
    const Rows x = step.rows(x_), out = assignment_rows(step, out_, width);
    const QuantRows quant = assignment_quant_rows(step, quant_, width);
    const Range range = part(step.num_rows * from.top_k, thread, step.num_threads);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int32_t source = from.sources[static_cast<size_t>(i)];
      Rows row = from_row(x, source / from.top_k);
      if (from.gating == Gating::SigmoidInput) {
        const float weight = from.weights[static_cast<size_t>(source)];
        float* scaled = from_row(out, i).data;
        for (int64_t c = 0; c < width; ++c) scaled[c] = row.data[c] * weight;
        row.data = scaled;
      } else if (!quant.data) {
        std::memcpy(from_row(out, i).data, row.data, static_cast<size_t>(width) * sizeof(float));
      }
      if (quant.data) step.context.kernels.quantise(row, from_row(quant, i), width, 0, 1);
    }
  }

 private:
  AssignmentsPtr assignments_;
  View x_;
  int out_, quant_;
};

// Rows of `stride` in a buffer, an assignment each; `quant` -1: not wanted.
struct AssignmentView {
  int buffer;
  int64_t stride;
  int quant;
};

// Each expert's linear layer over its own assignments.
class ExpertLinear : public NotByRows {
 public:
  ExpertLinear(AssignmentsPtr assignments, ExpertsPtr experts,
               std::vector<LinearParts> Experts::*layer, AssignmentView x, AssignmentView out)
      : NotByRows("expert_linear"),
        assignments_(std::move(assignments)),
        experts_(std::move(experts)),
        layer_(layer),
        x_(x),
        out_(out) {}
  void run(const Step& step, int thread) const override {
    const Rows x = assignment_rows(step, x_.buffer, x_.stride);
    const Rows out = assignment_rows(step, out_.buffer, out_.stride);
    for (const int32_t expert : assignments_->active) {
      const auto e = static_cast<size_t>(expert);
      const int64_t first = assignments_->starts[e];
      LinearArgs args{};
      args.num_rows = assignments_->starts[e + 1] - first;
      args.quantised = x_.quant >= 0;
      for (const LinearPart& layer : ((*experts_).*layer_)[e]) {
        const Weight& weight = layer.weight->weight;
        args.weight = &weight;
        if (args.quantised)
          args.xq = from_row(assignment_quant_rows(step, x_.quant, weight.num_inputs), first);
        else
          args.x = from_row(x, first);
        args.out = from_row(out, first);
        args.out.data += layer.offset;
        const Range tiles = part(weight.num_tiles(), thread, step.num_threads);
        step.context.kernels.linear(args, tiles.begin, tiles.end);
      }
    }
  }

 private:
  AssignmentsPtr assignments_;
  ExpertsPtr experts_;
  std::vector<LinearParts> Experts::*layer_;
  AssignmentView x_, out_;
};

// In place: silu(gate) * up over the gate.
class ExpertSiluMul : public NotByRows {
 public:
  ExpertSiluMul(AssignmentsPtr assignments, int64_t size, int gate_up, int quant)
      : NotByRows("expert_silu_mul"),
        assignments_(std::move(assignments)),
        size_(size),
        gate_up_(gate_up),
        quant_(quant) {}
  void run(const Step& step, int thread) const override {
    const Rows rows = assignment_rows(step, gate_up_, 2 * size_);
    const GateArgs args{rows, rows, assignment_quant_rows(step, quant_, size_), size_};
    const int64_t num_rows = step.num_rows * assignments_->top_k;
    const int64_t num_groups = (size_ + GROUP - 1) / GROUP;
    if (num_rows >= step.num_threads) {
      const Range range = part(num_rows, thread, step.num_threads);
      step.context.kernels.silu_mul(args, range.begin, range.end, 0, num_groups);
    } else {
      const Range groups = part(num_groups, thread, step.num_threads);
      step.context.kernels.silu_mul(args, 0, num_rows, groups.begin, groups.end);
    }
  }

 private:
  AssignmentsPtr assignments_;
  int64_t size_;
  int gate_up_, quant_;
};

// Adds each row's results, by ascending expert.
class Combine : public Node {
 public:
  Combine(AssignmentsPtr assignments, int x, View out)
      : Node("combine"), assignments_(std::move(assignments)), x_(x), out_(out) {}
  // With fewer rows than threads, columns are shared out instead.
  bool by_rows(int64_t num_rows, int num_threads) const override {
    return num_rows >= num_threads;
  }
  void run(const Step& step, int thread) const override {
    const Assignments& from = *assignments_;
    const Rows x = assignment_rows(step, x_, out_.width), out = step.rows(out_);
    const bool whole = by_rows(step.num_rows, step.num_threads);
    const Range all_rows{0, step.num_rows}, all_columns{0, out_.width};
    const Range rows = whole ? part(step.num_rows, thread, step.num_threads) : all_rows;
    const Range columns = whole ? all_columns : part(out_.width, thread, step.num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      float* sum = out.data + row * out.stride;
      for (int i = 0; i < from.top_k; ++i) {
        const auto entry = static_cast<size_t>(row * from.top_k + i);
        // The sigmoid is in the input already; a product with 1 changes nothing.
        const float weight =
            from.gating == Gating::SigmoidInput ? 1.0f : from.weights[entry];
        const float* result = from_row(x, from.places[entry]).data;
        if (i == 0)
          for (int64_t c = columns.begin; c < columns.end; ++c) sum[c] = result[c] * weight;
        else
          for (int64_t c = columns.begin; c < columns.end; ++c) sum[c] += result[c] * weight;
      }
    }
  }

 private:
  AssignmentsPtr assignments_;
  int x_;
  View out_;
};

}  // namespace

std::vector<std::unique_ptr<Node>> moe_nodes(ExpertsPtr experts, AssignmentsPtr assignments,
                                             View x, View scores, View out, MoeBuffers buffers) {
  const int64_t hidden = experts->hidden_size, size = experts->intermediate_size;
  const AssignmentView rows{buffers.rows, hidden, buffers.quant_rows};
  const AssignmentView gate_up{buffers.gate_up, 2 * size, buffers.quant_gated};
  std::vector<std::unique_ptr<Node>> nodes;
  nodes.push_back(std::make_unique<Route>(assignments, scores));
  nodes.push_back(std::make_unique<Group>(assignments));
  nodes.push_back(std::make_unique<Gather>(assignments, x, buffers.rows, buffers.quant_rows));
  nodes.push_back(
      std::make_unique<ExpertLinear>(assignments, experts, &Experts::gate_up, rows, gate_up));
  nodes.push_back(std::make_unique<ExpertSiluMul>(assignments, size, buffers.gate_up,
                                                  buffers.quant_gated));
  // What was gathered has been read: its buffer takes the results.
  nodes.push_back(
      std::make_unique<ExpertLinear>(assignments, experts, &Experts::down, gate_up, rows));
  nodes.push_back(std::make_unique<Combine>(assignments, buffers.rows, out));
  return nodes;
}

}  // namespace eyas
