// A recorded forward of two layers, one with experts: whatever the threads and however the tokens are
// cut into steps, a token's output is the same. For ThreadSanitizer, too.
#include <algorithm>

#include "moe.h"
#include "weights.h"

namespace eyas::test {
namespace {

constexpr int64_t HIDDEN = 64, INTERMEDIATE = 96, VOCABULARY = 50;
constexpr AttentionShape SHAPE{4, 2, 16};
constexpr int64_t Q = 64, KV = 32;
constexpr int BLOCK_SIZE = 16, NUM_BLOCKS = 24;
constexpr int NUM_EXPERTS = 4, TOP_K = 2;

// The same weights for every program.
struct Model {
  WeightPtr table, qkv, o, gate_up, down, router, head;
  std::vector<float> norm;
  std::shared_ptr<Experts> experts;
  Gating gating;
  bool int8;
};

WeightPtr packed(Random& random, Format format, int64_t num_outputs, int64_t num_inputs) {
  auto weight = std::make_shared<PackedWeight>();
  weight->arena = std::make_shared<Arena>();
  weight->weight.format = format;
  weight->weight.num_outputs = num_outputs;
  weight->weight.num_inputs = num_inputs;
  weight->weight.panel_bytes = panel_bytes(format, num_inputs);
  uint8_t* panels = weight->arena->take(weight->weight.panel_bytes * weight->weight.num_tiles());
  weight->weight.panels = panels;
  const auto bytes = static_cast<size_t>(row_bytes(format, num_inputs));
  for (int64_t tile = 0; tile < weight->weight.num_tiles(); ++tile) {
    std::vector<std::vector<uint8_t>> rows(TILE, std::vector<uint8_t>(bytes));
    std::vector<const uint8_t*> pointers;
    for (auto& row : rows) {
      if (is_quantised(format)) {
        for (uint8_t& byte : row) byte = static_cast<uint8_t>(random.bits());
        for (size_t at = 0; at < bytes; at += static_cast<size_t>(row_bytes(format, GROUP))) {
          row[at] = static_cast<uint8_t>(random.bits());
          row[at + 1] = 0x1c;  // a scale of about 0.004
        }
      } else {
        for (size_t at = 0; at < bytes; at += 4) {
          const float x = 0.2f * random.value();
          std::memcpy(row.data() + at, &x, 4);
        }
      }
      pointers.push_back(row.data());
    }
    const int64_t left = num_outputs - tile * TILE;
    pack_panel(format, num_inputs, pointers.data(), static_cast<int>(left < TILE ? left : TILE),
               panels + tile * weight->weight.panel_bytes);
  }
  return weight;
}

Model random_model(Random& random) {
  Model m;
  const Format format = random.pick({Format::F32, Format::Q4_0, Format::Q5_0, Format::Q8_0});
  m.int8 = is_quantised(format) && random.one_in(2);
  m.gating = random.pick({Gating::SigmoidInput, Gating::SoftmaxAll, Gating::SoftmaxChosen});
  m.table = packed(random, format, VOCABULARY, HIDDEN);
  m.qkv = packed(random, format, Q + 2 * KV, HIDDEN);
  m.o = packed(random, format, HIDDEN, Q);
  m.gate_up = packed(random, format, 2 * INTERMEDIATE, HIDDEN);
  m.down = packed(random, format, HIDDEN, INTERMEDIATE);
  m.router = packed(random, Format::F32, NUM_EXPERTS, HIDDEN);
  m.head = packed(random, format, VOCABULARY, HIDDEN);
  m.experts = std::make_shared<Experts>();
  m.experts->hidden_size = HIDDEN;
  m.experts->intermediate_size = INTERMEDIATE;
  for (int e = 0; e < NUM_EXPERTS; ++e) {
    m.experts->gate_up.push_back({{packed(random, format, INTERMEDIATE, HIDDEN), 0},
                                  {packed(random, format, INTERMEDIATE, HIDDEN), INTERMEDIATE}});
    m.experts->down.push_back({{packed(random, format, HIDDEN, INTERMEDIATE), 0}});
  }
  for (int64_t i = 0; i < HIDDEN; ++i) m.norm.push_back(1.0f + 0.1f * random.value());
  return m;
}

struct Recorded {
  std::unique_ptr<Program> program;
  int out;
};

Recorded record(const Model& m, std::shared_ptr<Context> context) {
  auto program = std::make_unique<Program>(std::move(context));
  Program& p = *program;
  const auto buffer = [&](int64_t width) { return View{p.add_buffer(width), 0, width}; };
  const auto quant = [&](int64_t width) { return m.int8 ? p.add_quant_buffer(width) : -1; };
  const View x = buffer(HIDDEN), normed = buffer(HIDDEN), qkv = buffer(Q + 2 * KV);
  const View cos = buffer(8), sin = buffer(8), attended = buffer(Q), gates = buffer(2 * INTERMEDIATE);
  const View gated = buffer(INTERMEDIATE), scores = buffer(NUM_EXPERTS), mixed = buffer(HIDDEN);
  const View q{qkv.buffer, 0, Q}, k{qkv.buffer, Q, KV}, v{qkv.buffer, Q + KV, KV};
  const View logits = buffer(VOCABULARY);
  const int normed_q = quant(HIDDEN), attended_q = quant(Q), gated_q = quant(INTERMEDIATE);
  const MoeBuffers moe{p.add_buffer(TOP_K * HIDDEN), p.add_buffer(TOP_K * 2 * INTERMEDIATE),
                       quant(TOP_K * HIDDEN), quant(TOP_K * INTERMEDIATE)};
  const auto assignments = std::make_shared<Assignments>(NUM_EXPERTS, TOP_K, m.gating);

  p.add_node(embed_node(m.table, 0, 0, x));
  p.add_node(angles_node({1.0f, 0.5f, 0.25f, 0.1f, 0.05f, 0.02f, 0.01f, 0.001f}, 1, cos, sin));
  for (int layer = 0; layer < 2; ++layer) {
    p.add_node(norm_node(m.norm, 1e-5f, x, normed, normed_q));
    p.add_node(linear_node(m.qkv, normed, normed_q, qkv, false));
    p.add_node(rope_node(q, q, cos, sin, SHAPE.head_dim, layer == 0));
    p.add_node(rope_node(k, k, cos, sin, SHAPE.head_dim, layer == 0));
    const AttentionRef ref{0, 0, layer};
    p.add_node(write_kv_node(ref, k, v));
    p.add_node(attention_node(ref, q, attended, 0.25f));
    p.add_node(merge_node(ref, attended));
    if (m.int8) p.add_node(quantise_node(attended, attended_q));
    p.add_node(linear_node(m.o, attended, attended_q, x, true));
    p.add_node(norm_node(m.norm, 1e-5f, x, normed, normed_q));
    if (layer == 0) {
      p.add_node(linear_node(m.gate_up, normed, normed_q, gates, false));
      p.add_node(silu_mul_node(gates, gated, gated_q));
      p.add_node(linear_node(m.down, gated, gated_q, x, true));
    } else {
      p.add_node(linear_node(m.router, normed, -1, scores, false));
      for (auto& node : moe_nodes(m.experts, assignments, normed, scores, mixed, moe))
        p.add_node(std::move(node));
      p.add_node(add_node(x, mixed, x));
    }
  }
  p.add_node(norm_node(m.norm, 1e-5f, x, normed, normed_q));
  p.add_node(linear_node(m.head, normed, normed_q, logits, false));
  return {std::move(program), logits.buffer};
}

// Two requests, whose tokens come in steps of random sizes, or all at once.
Matrix forward(const KernelTable& table, Random& random, const Model& m,
               const std::vector<int64_t>& tokens, int64_t first_length, int num_threads,
               bool in_steps) {
  auto context = std::make_shared<Context>(table, num_threads);
  Recorded recorded = record(m, context);
  if (random.one_in(2)) recorded.program->set_profiling(true);
  const int64_t slots = int64_t{NUM_BLOCKS} * BLOCK_SIZE * KV;
  std::vector<float> keys(static_cast<size_t>(2 * slots), NAN), values = keys;
  KVCache cache;
  for (int layer = 0; layer < 2; ++layer)
    cache.layers.push_back(
        {KVType::F32, keys.data() + layer * slots, values.data() + layer * slots});
  std::vector<int32_t> blocks(NUM_BLOCKS);
  for (int i = 0; i < NUM_BLOCKS; ++i) blocks[static_cast<size_t>(i)] = i;
  random.shuffle(blocks);
  const std::vector<int32_t> own[2] = {{blocks.begin(), blocks.begin() + NUM_BLOCKS / 2},
                                       {blocks.begin() + NUM_BLOCKS / 2, blocks.end()}};
  const auto total = static_cast<int64_t>(tokens.size());
  const int64_t begins[2] = {0, first_length}, ends[2] = {first_length, total};
  Matrix out(total, VOCABULARY);
  for (int64_t done[2] = {0, 0}; begins[0] + done[0] < ends[0] || begins[1] + done[1] < ends[1];) {
    std::vector<Span> spans;
    std::vector<int64_t> ids, positions, places;
    for (int r = 0; r < 2; ++r) {
      const int64_t left = ends[r] - begins[r] - done[r];
      const int64_t count = in_steps ? std::min<int64_t>(left, random.between(0, 9)) : left;
      if (count == 0) continue;
      spans.push_back({static_cast<int64_t>(ids.size()), count, done[r], 0, own[r]});
      for (int64_t i = 0; i < count; ++i) {
        places.push_back(begins[r] + done[r]);
        ids.push_back(tokens[static_cast<size_t>(places.back())]);
        positions.push_back(done[r]++);
      }
    }
    if (ids.empty()) continue;
    const AttentionPlan plan(SHAPE, BLOCK_SIZE, 0, std::move(spans), num_threads);
    Matrix logits(static_cast<int64_t>(ids.size()), VOCABULARY);
    const bool ran = recorded.program->run(logits.rows, {{recorded.out, logits.values.data()}},
                                           {ids.data(), positions.data()}, {&plan}, {&cache});
    if (!ran) fail("program: did not run");
    for (int64_t i = 0; i < logits.rows; ++i)
      std::copy_n(logits.row(i), VOCABULARY, out.row(places[static_cast<size_t>(i)]));
  }
  recorded.program->profile();
  return out;
}

}  // namespace

void test_program(const KernelTable& table, Run run) {
  Random& random = run.random;
  for (int i = 0; i < 3 * run.effort; ++i) {
    const Model model = random_model(random);
    std::vector<int64_t> tokens(static_cast<size_t>(random.between(1, 190)));
    for (int64_t& token : tokens) token = random.between(0, VOCABULARY - 1);
    const int64_t first = random.between(0, static_cast<int64_t>(tokens.size()));
    const Matrix expected = forward(table, random, model, tokens, first, 1, false);
    for (const float x : expected.values)
      if (!std::isfinite(x)) fail("program: an output is not finite");
    for (int threads = 1; threads <= 4; ++threads)
      for (const bool in_steps : {false, true}) {
        const Matrix out = forward(table, random, model, tokens, first, threads, in_steps);
        check_same(out.values.data(), expected.values.data(),
                   static_cast<int64_t>(expected.values.size()),
                   "program with " + std::to_string(threads) + " threads");
      }
  }
}

}  // namespace eyas::test
