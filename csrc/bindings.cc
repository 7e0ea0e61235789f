// The only file that knows Python. Pointers come in as integers (`Tensor.data_ptr()`); the Python
// side has checked shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <tuple>

#include "collective.h"
#include "moe.h"
#include "nodes.h"
#include "pack.h"
#include "peaks.h"
#include "quantise_weights.h"
#include "philox.h"
#include "top_k.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace eyas {
namespace {

constexpr const char* FORKED =
    "the process has forked: start processes with 'spawn', not 'fork'";

// Runs what works on the pool, without holding the interpreter. Throws in a forked child.
template <class Function>
void run_on_pool(Function function) {
  bool done;
  {
    nb::gil_scoped_release release;
    done = function();
  }
  if (!done) throw std::runtime_error(FORKED);
}

const KernelTable& find_table(const std::string& name) {
  std::string known;
  for (auto table = kernel_tables(); *table; ++table) {
    if (name == (*table)->name) {
      if (is_supported(**table)) return **table;
      throw std::invalid_argument("this machine can't run the instruction set '" + name + "'");
    }
    known += (known.empty() ? "" : ", ") + std::string((*table)->name);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not in this build: use one of " +
                              known);
}

const KernelTable& best_table() {
  auto table = kernel_tables();
  while (!is_supported(**table)) ++table;
  return **table;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (auto table = kernel_tables(); *table; ++table)
    if (is_supported(**table)) names.emplace_back((*table)->name);
  return names;
}

Format format_of(const std::string& name) {
  const auto format = format_from_name(name);
  if (!format) throw std::invalid_argument("format " + name + " has no kernel");
  return *format;
}

std::shared_ptr<PackedWeight> make_weight(const std::shared_ptr<Arena>& arena,
                                          const std::string& format_name, int64_t num_outputs,
                                          int64_t num_inputs, uintptr_t bias) {
  const Format format = format_of(format_name);
  if (num_inputs % block_inputs(format))
    throw std::invalid_argument("a row of " + std::to_string(num_inputs) +
                                " inputs is not in whole blocks of " + format_name);
  auto packed = std::make_shared<PackedWeight>();
  packed->arena = arena;
  Weight& weight = packed->weight;
  weight.format = format;
  weight.num_outputs = num_outputs;
  weight.num_inputs = num_inputs;
  weight.panel_bytes = panel_bytes(format, num_inputs);
  weight.panels = arena->take(weight.panel_bytes * weight.num_tiles());
  if (bias) {
    const float* values = reinterpret_cast<const float*>(bias);
    packed->bias.assign(values, values + num_outputs);
    packed->bias.resize(static_cast<size_t>(weight.num_tiles() * TILE), 0.0f);
    weight.bias = packed->bias.data();
  }
  return packed;
}

// Packs `num_rows` stored rows, from row first_panel * TILE of the weight on. False if a value is not
// finite.
bool pack_rows(PackedWeight& packed, Context& context, int64_t first_panel, uintptr_t address,
               int64_t stride, int64_t num_rows) {
  struct Call {
    const Weight& weight;
    int64_t first_panel, stride, num_rows;
    const uint8_t* rows;
    int threads;
    std::atomic<bool> finite;
  } call{packed.weight, first_panel, stride, num_rows, reinterpret_cast<const uint8_t*>(address),
         context.pool.size(), true};
  const auto body = [](void* argument, int thread) {
    Call& c = *static_cast<Call*>(argument);
    for (int64_t i = thread; i * TILE < c.num_rows; i += c.threads) {
      const uint8_t* rows[TILE];
      int n = 0;
      for (; n < TILE && i * TILE + n < c.num_rows; ++n)
        rows[n] = c.rows + (i * TILE + n) * c.stride;
      uint8_t* panel = const_cast<uint8_t*>(c.weight.panels) +
                       (c.first_panel + i) * c.weight.panel_bytes;
      if (!pack_panel(c.weight.format, c.weight.num_inputs, rows, n, panel)) c.finite = false;
    }
  };
  run_on_pool([&] { return context.pool.run(body, &call); });
  return call.finite;
}

// Quantises num_rows * num_inputs floats into `out`. False if float16 can't hold a scale.
bool quantise(Context& context, const std::string& format_name, uintptr_t address,
              int64_t num_rows, int64_t num_inputs, uintptr_t out) {
  const Format format = format_of(format_name);
  if ((format != Format::Q8_0 && format != Format::Q4_1) || num_inputs % GROUP)
    throw std::invalid_argument("rows of " + std::to_string(num_inputs) +
                                " floats can't be quantised to " + format_name);
  bool fits;
  run_on_pool([&] {
    return quantise_rows(context.pool, format, reinterpret_cast<const float*>(address), num_rows,
                         num_inputs, reinterpret_cast<uint8_t*>(out), fits);
  });
  return fits;
}

using SpanTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, std::vector<int32_t>>;

AttentionPlan* make_plan(const Context& context, std::tuple<int, int, int> heads, int block_size,
                         int64_t window, std::vector<SpanTuple> tuples) {
  std::vector<Span> spans;
  spans.reserve(tuples.size());
  for (auto& [row, tokens, position, first, blocks] : tuples)
    spans.push_back({row, tokens, position, first, std::move(blocks)});
  const auto [query, kv, dim] = heads;
  if (dim > MAX_HEAD_DIM)
    throw std::invalid_argument("head_dim " + std::to_string(dim) + " is over " +
                                std::to_string(MAX_HEAD_DIM) + ", the kernels' limit");
  return new AttentionPlan({query, kv, dim}, block_size, window, std::move(spans),
                           context.pool.size());
}

KVType kv_type(const std::string& name) {
  if (name == "f32") return KVType::F32;
  if (name == "f16") return KVType::F16;
  if (name == "bf16") return KVType::BF16;
  throw std::invalid_argument("keys and values can't be kept as " + name);
}

using ViewTuple = std::tuple<int, int64_t, int64_t>;
View view_of(const ViewTuple& v) { return {std::get<0>(v), std::get<1>(v), std::get<2>(v)}; }

using Floats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void run_program(Program& program, int64_t num_rows,
                 const std::vector<std::pair<int, Floats>>& externals,
                 const std::vector<Integers>& ids,
                 const std::vector<const AttentionPlan*>& plans,
                 const std::vector<const KVCache*>& caches) {
  std::vector<Program::External> outside;
  for (const auto& [buffer, array] : externals) {
    if (static_cast<int64_t>(array.shape(0)) != num_rows ||
        static_cast<int64_t>(array.shape(1)) != program.width(buffer))
      throw std::invalid_argument("an array has another shape than the program's");
    outside.push_back({buffer, array.data()});
  }
  std::vector<const int64_t*> integers;
  for (const Integers& array : ids) {
    if (static_cast<int64_t>(array.shape(0)) != num_rows)
      throw std::invalid_argument("an integer array has another length than the program's rows");
    integers.push_back(array.data());
  }
  run_on_pool([&] { return program.run(num_rows, outside, integers, plans, caches); });
}

std::tuple<double, double, double> find_peaks(Context& context, int64_t size, int repeats) {
  Peaks peaks{};
  run_on_pool([&] { return measure_peaks(context, size, repeats, peaks); });
  return {peaks.read_bytes_per_s, peaks.int8_mac_per_s, peaks.float_fma_per_s};
}

template <class T>
void select_top_k(uintptr_t values, int64_t count, int64_t k, uintptr_t indices) {
  top_k(reinterpret_cast<const T*>(values), count, k, reinterpret_cast<int64_t*>(indices));
}

using PartTuple = std::tuple<WeightPtr, int64_t>;

std::vector<LinearParts> parts_of(const std::vector<std::vector<PartTuple>>& layers) {
  std::vector<LinearParts> result;
  for (const auto& layer : layers) {
    auto& parts = result.emplace_back();
    for (const auto& [weight, offset] : layer) parts.push_back({weight, offset});
  }
  return result;
}

Gating gating_of(const std::string& kind, bool normalise) {
  if (kind == "sigmoid_input") return Gating::SigmoidInput;
  if (kind == "softmax_output") return normalise ? Gating::SoftmaxChosen : Gating::SoftmaxAll;
  throw std::invalid_argument("routing of kind '" + kind + "' has no kernel");
}

using StreamTuple = std::tuple<uint64_t, uint32_t, uint32_t, uint32_t>;
NoiseStream stream_of(const StreamTuple& s) {
  return {std::get<0>(s), std::get<1>(s), std::get<2>(s), std::get<3>(s)};
}

}  // namespace
}  // namespace eyas

NB_MODULE(_core, m) {
  using namespace eyas;
  m.doc() = "Eyas's kernels and programs; see csrc/.";
  nb::set_leak_warnings(false);  // an engine that lives until the process ends is no leak
  m.attr("TILE") = TILE;
  m.attr("GROUP") = GROUP;
  m.def("instruction_sets", &instruction_sets, "What this machine can run, best first.");
  m.def("row_bytes", [](const std::string& format, int64_t n) {
    return row_bytes(format_of(format), n);
  });

  m.def("best_index",
        [](const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& row) {
          return best_table().best_index(row.data(), static_cast<int64_t>(row.shape(0)));
        },
        "row"_a, "The first of the greatest values; -1 if any value is not finite.");
  m.def("top_k_f32", &select_top_k<float>, "values"_a, "count"_a, "k"_a, "indices"_a);
  m.def("top_k_f64", &select_top_k<double>, "values"_a, "count"_a, "k"_a, "indices"_a);
  m.def("random_bits",
        [](const std::string& isa, const StreamTuple& stream, uintptr_t ids, int64_t count,
           uintptr_t bits) {
          random_bits(find_table(isa), stream_of(stream), reinterpret_cast<const int64_t*>(ids),
                      count, reinterpret_cast<int64_t*>(bits));
        },
        "instruction_set"_a, "stream"_a, "ids"_a, "count"_a, "bits"_a);
  m.def("loud_bits",
        [](const std::string& isa, const StreamTuple& stream, int64_t num_ids, uint32_t floor,
           uintptr_t ids, uintptr_t bits) {
          return loud_bits(find_table(isa), stream_of(stream), num_ids, floor,
                           reinterpret_cast<int64_t*>(ids), reinterpret_cast<int64_t*>(bits));
        },
        "instruction_set"_a, "stream"_a, "num_ids"_a, "floor"_a, "ids"_a, "bits"_a);

  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Context>(m, "Context")
      .def("__init__",
           [](Context* self, const std::string& isa, int threads) {
             new (self) Context(find_table(isa), threads);
           },
           "instruction_set"_a, "num_threads"_a)
      .def_prop_ro("instruction_set", [](const Context& c) { return c.kernels.name; })
      .def_prop_ro("num_threads", [](const Context& c) { return c.pool.size(); });
  m.def("measure_peaks", &find_peaks, "context"_a, "size"_a, "repeats"_a);
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def_prop_ro("num_outputs", [](const PackedWeight& w) { return w.weight.num_outputs; })
      .def_prop_ro("num_inputs", [](const PackedWeight& w) { return w.weight.num_inputs; })
      .def_prop_ro("nbytes",
                   [](const PackedWeight& w) { return w.weight.panel_bytes * w.weight.num_tiles(); })
      .def("pack_rows", &pack_rows, "context"_a, "first_panel"_a, "address"_a, "stride"_a,
           "num_rows"_a);
  m.def("make_weight", &make_weight, "arena"_a, "format"_a, "num_outputs"_a, "num_inputs"_a,
        "bias"_a);
  m.def("quantise_rows", &quantise, "context"_a, "format"_a, "address"_a, "num_rows"_a,
        "num_inputs"_a, "out"_a);
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def_ro("num_rows", &AttentionPlan::num_rows);
  m.def("plan_attention", &make_plan, nb::rv_policy::take_ownership, "context"_a, "heads"_a,
        "block_size"_a, "window"_a, "spans"_a);
  nb::class_<KVCache>(m, "KVCache")
      .def("__init__",
           [](KVCache* self, const std::string& type,
              const std::vector<std::pair<uintptr_t, uintptr_t>>& layers) {
             new (self) KVCache();
             for (const auto& [keys, values] : layers)
               self->layers.push_back({kv_type(type), reinterpret_cast<void*>(keys),
                                       reinterpret_cast<void*>(values)});
           },
           "type"_a, "layers"_a);

  nb::class_<Group>(m, "Group")
      .def_ro("rank", &Group::rank)
      .def_ro("size", &Group::size);
  m.attr("SLOT_FLOATS") = Group::SLOT_FLOATS;
  m.def("shared_group_bytes", &SharedGroup::num_bytes, "size"_a);
  nb::class_<SharedGroup, Group>(m, "SharedGroup")
      .def("__init__",
           [](SharedGroup* self,
              const nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& memory,
              int rank, int size) {
             if (static_cast<int64_t>(memory.shape(0)) < SharedGroup::num_bytes(size))
               throw std::invalid_argument("the ranks' memory is too small");
             new (self) SharedGroup(memory.data(), rank, size);
           },
           "memory"_a, "rank"_a, "size"_a, nb::keep_alive<1, 2>());
  nb::class_<CallbackGroup, Group>(m, "CallbackGroup")
      .def(nb::init<CallbackGroup::Exchange, int, int>(), "exchange"_a, "rank"_a, "size"_a);

  nb::class_<Experts>(m, "Experts")
      .def("__init__",
           [](Experts* self, const std::vector<std::vector<PartTuple>>& gate_up,
              const std::vector<std::vector<PartTuple>>& down, int64_t hidden_size,
              int64_t intermediate_size) {
             new (self) Experts{parts_of(gate_up), parts_of(down), hidden_size, intermediate_size};
           },
           "gate_up"_a, "down"_a, "hidden_size"_a, "intermediate_size"_a);
  nb::class_<Assignments>(m, "Assignments")
      .def("__init__",
           [](Assignments* self, int num_experts, int top_k, const std::string& kind,
              bool normalise) {
             new (self) Assignments(num_experts, top_k, gating_of(kind, normalise));
           },
           "num_experts"_a, "top_k"_a, "kind"_a, "normalise"_a);

  nb::class_<Program>(m, "Program")
      .def(nb::init<std::shared_ptr<Context>>())
      .def("add_buffer", &Program::add_buffer)
      .def("add_quant_buffer", &Program::add_quant_buffer)
      .def("embed",
           [](Program& p, WeightPtr table, int ids, int64_t first, const ViewTuple& out) {
             p.add_node(embed_node(std::move(table), ids, first, view_of(out)));
           })
      .def("linear",
           [](Program& p, WeightPtr weight, const ViewTuple& x, int quant, const ViewTuple& out,
              bool accumulate) {
             p.add_node(linear_node(std::move(weight), view_of(x), quant, view_of(out), accumulate));
           })
      .def("rms_norm",
           [](Program& p, std::vector<float> weight, float eps, const ViewTuple& x,
              const ViewTuple& out, int quant) {
             p.add_node(norm_node(std::move(weight), eps, view_of(x), view_of(out), quant));
           })
      .def("quantise",
           [](Program& p, const ViewTuple& x, int quant) {
             p.add_node(quantise_node(view_of(x), quant));
           })
      .def("silu_mul",
           [](Program& p, const ViewTuple& x, const ViewTuple& out, int quant) {
             p.add_node(silu_mul_node(view_of(x), view_of(out), quant));
           })
      .def("add",
           [](Program& p, const ViewTuple& x, const ViewTuple& y, const ViewTuple& out) {
             p.add_node(add_node(view_of(x), view_of(y), view_of(out)));
           })
      .def("scale_rows",
           [](Program& p, const ViewTuple& x, const ViewTuple& factor, const ViewTuple& out) {
             p.add_node(scale_rows_node(view_of(x), view_of(factor), view_of(out)));
           })
      .def("copy",
           [](Program& p, const ViewTuple& x, const ViewTuple& out) {
             p.add_node(copy_node(view_of(x), view_of(out)));
           })
      .def("angles",
           [](Program& p, std::vector<float> frequencies, int positions, const ViewTuple& cos,
              const ViewTuple& sin) {
             p.add_node(angles_node(std::move(frequencies), positions, view_of(cos), view_of(sin)));
           })
      .def("rope",
           [](Program& p, const ViewTuple& x, const ViewTuple& out, const ViewTuple& cos,
              const ViewTuple& sin, int64_t head_dim, bool interleaved) {
             p.add_node(rope_node(view_of(x), view_of(out), view_of(cos), view_of(sin), head_dim,
                                  interleaved));
           })
      .def("attention",
           [](Program& p, std::tuple<int, int, int> ref, const ViewTuple& q, const ViewTuple& k,
              const ViewTuple& v, const ViewTuple& out, float scale) {
             const AttentionRef r{std::get<0>(ref), std::get<1>(ref), std::get<2>(ref)};
             p.add_node(write_kv_node(r, view_of(k), view_of(v)));
             p.add_node(attention_node(r, view_of(q), view_of(out), scale));
             p.add_node(merge_node(r, view_of(out)));
           })
      .def("moe",
           [](Program& p, std::shared_ptr<Experts> experts,
              std::shared_ptr<Assignments> assignments, const ViewTuple& x,
              const ViewTuple& scores, const ViewTuple& out, std::tuple<int, int, int, int> b) {
             const MoeBuffers buffers{std::get<0>(b), std::get<1>(b), std::get<2>(b),
                                      std::get<3>(b)};
             for (auto& node : moe_nodes(std::move(experts), std::move(assignments), view_of(x),
                                         view_of(scores), view_of(out), buffers))
               p.add_node(std::move(node));
           })
      .def("gather",
           [](Program& p, std::shared_ptr<Group> group, const ViewTuple& x, const ViewTuple& out,
              std::vector<int64_t> widths, bool sum) {
             p.add_node(gather_node(std::move(group), view_of(x), view_of(out), std::move(widths),
                                    sum));
           })
      .def("run", &run_program, "num_rows"_a, "externals"_a, "ids"_a, "plans"_a, "caches"_a)
      .def("set_profiling", &Program::set_profiling)
      .def("profile", [](const Program& p) {
        std::vector<std::tuple<std::string, int64_t, double>> costs;
        for (const auto& cost : p.profile())
          costs.emplace_back(cost.kind, cost.calls, cost.seconds);
        return costs;
      });
}
