#include "nodes.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "node_parts.h"

namespace eyas {
namespace {

class Embed : public ByRows {
 public:
  Embed(WeightPtr table, int ids, int64_t first, View out)
      : ByRows("embed"), table_(std::move(table)), ids_(ids), first_(first), out_(out) {}
  void run_rows(const Step& step, Range range) const override {
    const Rows out = step.rows(out_);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t id = step.ids[static_cast<size_t>(ids_)][row] - first_;
      const Rows to{out.data + row * out.stride, out.stride};
      if (id < 0 || id >= table_->weight.num_outputs)
        std::memset(to.data, 0, static_cast<size_t>(out_.width) * sizeof(float));
      else
        step.context.kernels.embed(table_->weight, &id, to, 0, 1);
    }
  }

 private:
  WeightPtr table_;
  int ids_;
  int64_t first_;
  View out_;
};

class Linear : public NotByRows {
 public:
  Linear(WeightPtr weight, View x, int quant, View out, bool accumulate)
      : NotByRows("linear"),
        weight_(std::move(weight)),
        x_(x),
        out_(out),
        quant_(quant),
        accumulate_(accumulate) {}
  void run(const Step& step, int thread) const override {
    LinearArgs args{};
    args.weight = &weight_->weight;
    args.quantised = quant_ >= 0;
    if (args.quantised)
      args.xq = step.quant_rows(quant_);
    else
      args.x = step.rows(x_);
    args.accumulate = accumulate_;
    args.out = step.rows(out_);
    args.num_rows = step.num_rows;
    // The same tiles for a thread in every step: handing them out on demand was slower by a third.
    const Range tiles = part(weight_->weight.num_tiles(), thread, step.num_threads);
    step.context.kernels.linear(args, tiles.begin, tiles.end);
  }

 private:
  WeightPtr weight_;
  View x_, out_;
  int quant_;
  bool accumulate_;
};

class Norm : public ByRows {
 public:
  Norm(std::vector<float> weight, float eps, View x, View out, int quant)
      : ByRows("norm"), weight_(std::move(weight)), eps_(eps), x_(x), out_(out), quant_(quant) {}
  void run_rows(const Step& step, Range range) const override {
    const int64_t size = static_cast<int64_t>(weight_.size());
    const NormArgs args{step.rows(x_), step.rows(out_), step.quant_rows(quant_), weight_.data(),
                        size,          x_.width / size, eps_};
    step.context.kernels.rms_norm(args, range.begin, range.end);
  }

 private:
  std::vector<float> weight_;
  float eps_;
  View x_, out_;
  int quant_;
};

class Quantise : public ByRows {
 public:
  Quantise(View x, int quant) : ByRows("quantise"), x_(x), quant_(quant) {}
  void run_rows(const Step& step, Range range) const override {
    step.context.kernels.quantise(step.rows(x_), step.quant_rows(quant_), x_.width, range.begin,
                                  range.end);
  }

 private:
  View x_;
  int quant_;
};

class SiluMul : public Node {
 public:
  SiluMul(View x, View out, int quant) : Node("silu_mul"), x_(x), out_(out), quant_(quant) {}
  // With fewer rows than threads, a row's groups are shared out instead.
  bool by_rows(int64_t num_rows, int num_threads) const override {
    return num_rows >= num_threads;
  }
  void run(const Step& step, int thread) const override {
    const GateArgs args{step.rows(x_), step.rows(out_), step.quant_rows(quant_), out_.width};
    const bool whole = by_rows(step.num_rows, step.num_threads);
    const int64_t num_groups = (out_.width + GROUP - 1) / GROUP;
    const Range rows = whole ? part(step.num_rows, thread, step.num_threads)
                             : Range{0, step.num_rows};
    const Range groups = whole ? Range{0, num_groups}
                               : part(num_groups, thread, step.num_threads);
    step.context.kernels.silu_mul(args, rows.begin, rows.end, groups.begin, groups.end);
  }

 private:
  View x_, out_;
  int quant_;
};

class Add : public ByRows {
 public:
  Add(View x, View y, View out) : ByRows("add"), x_(x), y_(y), out_(out) {}
  void run_rows(const Step& step, Range range) const override {
    step.context.kernels.add(step.rows(x_), step.rows(y_), step.rows(out_), out_.width,
                             range.begin, range.end);
  }

 private:
  View x_, y_, out_;
};

class ScaleRows : public ByRows {
 public:
  ScaleRows(View x, View factor, View out)
      : ByRows("scale_rows"), x_(x), factor_(factor), out_(out) {}
  void run_rows(const Step& step, Range range) const override {
    const Rows x = step.rows(x_), factor = step.rows(factor_), out = step.rows(out_);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const float by = factor.data[row * factor.stride];
      for (int64_t i = 0; i < out_.width; ++i)
        out.data[row * out.stride + i] = x.data[row * x.stride + i] * by;
    }
  }

 private:
  View x_, factor_, out_;
};

class Copy : public ByRows {
 public:
  Copy(View x, View out) : ByRows("copy"), x_(x), out_(out) {}
  void run_rows(const Step& step, Range range) const override {
    const Rows x = step.rows(x_), out = step.rows(out_);
    for (int64_t row = range.begin; row < range.end; ++row)
      std::memcpy(out.data + row * out.stride, x.data + row * x.stride,
                  static_cast<size_t>(out_.width) * sizeof(float));
  }

 private:
  View x_, out_;
};

class Angles : public ByRows {
 public:
  Angles(std::vector<float> frequencies, int positions, View cos, View sin)
      : ByRows("angles"),
        frequencies_(std::move(frequencies)),
        positions_(positions),
        cos_(cos),
        sin_(sin) {}
  void run_rows(const Step& step, Range range) const override {
    const Rows cos = step.rows(cos_), sin = step.rows(sin_);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const float position =
          static_cast<float>(step.ids[static_cast<size_t>(positions_)][row]);
      for (size_t i = 0; i < frequencies_.size(); ++i) {
        // The product in float32, as models were trained; its cosine in double, rounded.
        const float angle = position * frequencies_[i];
        const int64_t at = static_cast<int64_t>(i);
        cos.data[row * cos.stride + at] = static_cast<float>(std::cos(static_cast<double>(angle)));
        sin.data[row * sin.stride + at] = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
    }
  }

 private:
  std::vector<float> frequencies_;
  int positions_;
  View cos_, sin_;
};

class Rope : public ByRows {
 public:
  Rope(View x, View out, View cos, View sin, int64_t head_dim, bool interleaved)
      : ByRows("rope"),
        x_(x),
        out_(out),
        cos_(cos),
        sin_(sin),
        head_dim_(head_dim),
        interleaved_(interleaved) {}
  void run_rows(const Step& step, Range range) const override {
    const RopeArgs args{step.rows(x_),        step.rows(out_),       x_.width / head_dim_,
                        head_dim_,            step.rows(cos_).data,  step.rows(sin_).data,
                        interleaved_};
    step.context.kernels.rope(args, range.begin, range.end);
  }

 private:
  View x_, out_, cos_, sin_;
  int64_t head_dim_;
  bool interleaved_;
};

const AttentionPlan& plan_of(const Step& step, const AttentionRef& ref) {
  return *step.plans[static_cast<size_t>(ref.plan)];
}

AttentionArgs attention_args(const Step& step, const AttentionRef& ref) {
  const AttentionPlan& plan = plan_of(step, ref);
  AttentionArgs args{};
  args.shape = plan.shape;
  args.block_size = plan.block_size;
  args.rows = plan.rows.data();
  args.kv = step.caches[static_cast<size_t>(ref.cache)]->layers[static_cast<size_t>(ref.layer)];
  args.partials = step.partials;
  return args;
}

class WriteKV : public ByRows {
 public:
  WriteKV(AttentionRef ref, View k, View v) : ByRows("write_kv"), ref_(ref), k_(k), v_(v) {}
  void run_rows(const Step& step, Range range) const override {
    AttentionArgs args = attention_args(step, ref_);
    args.k = step.rows(k_);
    args.v = step.rows(v_);
    step.context.kernels.write_kv(args, range.begin, range.end);
  }

 private:
  AttentionRef ref_;
  View k_, v_;
};

class Attention : public NotByRows {
 public:
  Attention(AttentionRef ref, View q, View out, float scale)
      : NotByRows("attention"), ref_(ref), q_(q), out_(out), scale_(scale) {}
  void run(const Step& step, int thread) const override {
    AttentionArgs args = attention_args(step, ref_);
    args.q = step.rows(q_);
    args.out = step.rows(out_);
    args.scale = scale_;
    const auto& tasks = plan_of(step, ref_).tasks;
    auto* scratch =
        reinterpret_cast<float*>(step.context.scratch[static_cast<size_t>(thread)].get());
    // Interleaved: later tokens of a prompt see more keys.
    for (size_t i = static_cast<size_t>(thread); i < tasks.size();
         i += static_cast<size_t>(step.num_threads))
      step.context.kernels.attention(args, tasks[i], scratch);
  }

 private:
  AttentionRef ref_;
  View q_, out_;
  float scale_;
};

class Merge : public NotByRows {
 public:
  Merge(AttentionRef ref, View out) : NotByRows("merge"), ref_(ref), out_(out) {}
  bool is_empty(const Step& step) const override { return plan_of(step, ref_).merges.empty(); }
  void run(const Step& step, int thread) const override {
    const AttentionArgs args = attention_args(step, ref_);
    const Rows out = step.rows(out_);
    const auto& merges = plan_of(step, ref_).merges;
    const Range range = part(static_cast<int64_t>(merges.size()), thread, step.num_threads);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const MergeItem& item = merges[static_cast<size_t>(i)];
      step.context.kernels.merge(
          args, step.partials + item.partial, item.stride, item.num_spans,
          out.data + item.row * out.stride + item.query_head * args.shape.head_dim);
    }
  }

 private:
  AttentionRef ref_;
  View out_;
};

}  // namespace

std::unique_ptr<Node> embed_node(WeightPtr table, int ids, int64_t first, View out) {
  return std::make_unique<Embed>(std::move(table), ids, first, out);
}
std::unique_ptr<Node> linear_node(WeightPtr weight, View x, int quant, View out, bool accumulate) {
  return std::make_unique<Linear>(std::move(weight), x, quant, out, accumulate);
}
std::unique_ptr<Node> norm_node(std::vector<float> weight, float eps, View x, View out, int quant) {
  return std::make_unique<Norm>(std::move(weight), eps, x, out, quant);
}
std::unique_ptr<Node> quantise_node(View x, int quant) {
  return std::make_unique<Quantise>(x, quant);
}
std::unique_ptr<Node> silu_mul_node(View gate_up, View out, int quant) {
  return std::make_unique<SiluMul>(gate_up, out, quant);
}
std::unique_ptr<Node> add_node(View x, View y, View out) {
  return std::make_unique<Add>(x, y, out);
}
std::unique_ptr<Node> scale_rows_node(View x, View factor, View out) {
  return std::make_unique<ScaleRows>(x, factor, out);
}
std::unique_ptr<Node> copy_node(View x, View out) { return std::make_unique<Copy>(x, out); }
std::unique_ptr<Node> angles_node(std::vector<float> frequencies, int positions, View cos,
                                  View sin) {
  return std::make_unique<Angles>(std::move(frequencies), positions, cos, sin);
}
std::unique_ptr<Node> rope_node(View x, View out, View cos, View sin, int64_t head_dim,
                                bool interleaved) {
  return std::make_unique<Rope>(x, out, cos, sin, head_dim, interleaved);
}
std::unique_ptr<Node> write_kv_node(AttentionRef ref, View k, View v) {
  return std::make_unique<WriteKV>(ref, k, v);
}
std::unique_ptr<Node> attention_node(AttentionRef ref, View q, View out, float scale) {
  return std::make_unique<Attention>(ref, q, out, scale);
}
std::unique_ptr<Node> merge_node(AttentionRef ref, View out) {
  return std::make_unique<Merge>(ref, out);
}

}  // namespace eyas
