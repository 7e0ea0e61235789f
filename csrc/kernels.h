// The kernels' C++ API: pointers and sizes only. It knows no Python and no torch.
//
// The contract of every kernel: a row's result is the same bits whatever the other rows are, however
// many there are, and however the work is cut into ranges. See docs/kernels.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eyas {

constexpr int TILE = 16;   // output columns that a weight panel interleaves
constexpr int GROUP = 32;  // consecutive inputs that share a scale
constexpr int ALIGN = 64;  // of every buffer and panel

struct Half {  // IEEE binary16
  uint16_t bits;
};
struct BFloat {  // bfloat16
  uint16_t bits;
};

enum class Format : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
enum class KVType : int { F32, F16, BF16 };

// What the int8 kernels know of a row's group of 32 inputs: x is about scale * q, with q in
// -127..127.
struct GroupInfo {
  float scale;
  float sum;         // scale * (sum of q)
  float offset;      // -128 * (sum of q): what 128 added to every weight would add, exactly
  int32_t low_sum;   // sum of q over the first half, and the second
  int32_t high_sum;
};

// Rows of activations: float32, and where a weight wants int8, their quantised twin.
struct Rows {
  float* data = nullptr;
  int64_t stride = 0;  // in floats
};
struct QuantRows {
  int8_t* data = nullptr;
  GroupInfo* info = nullptr;
  int64_t stride = 0;       // in bytes
  int64_t info_stride = 0;  // in groups
};

// A [N, K] weight, packed in panels of TILE columns of the output (see pack.cc).
struct Weight {
  Format format = Format::F32;
  int64_t num_outputs = 0;  // N
  int64_t num_inputs = 0;   // K
  int64_t panel_bytes = 0;
  const uint8_t* panels = nullptr;
  const float* bias = nullptr;  // [N rounded up to TILE], or null
  int64_t num_tiles() const { return (num_outputs + TILE - 1) / TILE; }
};

struct LinearArgs {
  const Weight* weight;
  Rows x;        // read if `quantised` is false
  QuantRows xq;  // read if it is true
  bool quantised;
  bool accumulate;  // out += instead of out =
  Rows out;
  int64_t num_rows;
};

struct NormArgs {
  Rows x, out;
  QuantRows quant;      // data null: not wanted
  const float* weight;  // [size]
  int64_t size;         // a row is `count` runs of `size` values, each normalised alone
  int64_t count;
  float eps;
};

struct RopeArgs {
  Rows x, out;  // may be the same
  int64_t num_heads, head_dim;
  const float* cos;  // [rows, head_dim / 2]
  const float* sin;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + head_dim / 2)
};

struct GateArgs {
  Rows x, out;  // x: [rows, 2 * size], gate then up
  QuantRows quant;
  int64_t size;
};

// One layer's paged cache: keys [block, G, D, block_size], values [block, G, block_size, D].
struct KVLayer {
  KVType type;
  void* keys;
  void* values;
};

struct AttentionShape {
  int num_query_heads, num_kv_heads, head_dim;
};

// One row of the batch: the positions it sees, and where its request's blocks are.
struct AttentionRow {
  int64_t position;
  int64_t first_visible;
  const int32_t* blocks;  // blocks[p / block_size - first_block] holds position p
  int64_t first_block;
};

constexpr int KEY_TILE = 64;    // keys per step of the online softmax
constexpr int KEY_SPAN = 128;   // keys whose partial result may be computed by another thread
constexpr int MAX_QUERIES = 32;  // rows (tokens times query heads of one KV head) of a task
constexpr int MAX_HEAD_DIM = 1024;

// Some consecutive tokens of one request, for one KV head: the unit of work of attention.
struct AttentionTask {
  int64_t row;         // first row of the batch
  int num_tokens;      // times num_query_heads / num_kv_heads <= MAX_QUERIES, or 1 token
  int kv_head;
  int64_t span_begin;  // spans of KEY_SPAN keys: all that the rows see, or some of them
  int64_t span_end;
  int64_t partial;     // -1: write the result; otherwise the first row of partial results
};

struct AttentionArgs {
  AttentionShape shape;
  int block_size;
  const AttentionRow* rows;
  Rows q, k, v, out;
  KVLayer kv;
  float scale;
  float* partials;  // [task][span][row of the task][partial_size]
};

// What a random number is for: every word of Philox's counter but the first, and its key.
struct NoiseStream {
  uint64_t seed;
  uint32_t position, sample, domain;
};

constexpr int PHILOX_BATCH = 64;

struct PhiloxBatch {
  alignas(ALIGN) uint32_t words[4][PHILOX_BATCH];
};

// One implementation of everything, for one instruction set.
struct KernelTable {
  const char* name;
  // Output tiles [tile_begin, tile_end) of all rows.
  void (*linear)(const LinearArgs&, int64_t tile_begin, int64_t tile_end);
  // The others: rows [begin, end).
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
  void (*silu_mul)(const GateArgs&, int64_t begin, int64_t end, int64_t group_begin,
                   int64_t group_end);
  void (*quantise)(const Rows& x, const QuantRows& out, int64_t size, int64_t begin, int64_t end);
  void (*add)(const Rows& x, const Rows& y, const Rows& out, int64_t size, int64_t begin,
              int64_t end);
  void (*embed)(const Weight&, const int64_t* ids, const Rows& out, int64_t begin, int64_t end);
  void (*write_kv)(const AttentionArgs&, int64_t begin, int64_t end);
  void (*attention)(const AttentionArgs&, const AttentionTask&, float* scratch);
  // Merges the partial results of a row's spans; one (row, query head) at a time.
  void (*merge)(const AttentionArgs&, const float* partials, int64_t partial_stride, int num_spans,
                float* out);
  // Philox4x32-10 of the counters whose first words are words[0], over all four words. Returns the
  // greatest of words 0 and 2.
  uint32_t (*philox)(const NoiseStream&, PhiloxBatch&);
  // The first of the greatest of `size` values, at least 1; -1 if any is NaN or infinite.
  int64_t (*best_index)(const float* x, int64_t size);
  // Loops over registers, and how many multiply-adds they made; see peaks.h.
  int64_t (*int8_peak)(const uint8_t* bytes, int64_t iterations, float* sink);
  int64_t (*float_peak)(const float* values, int64_t iterations, float* sink);
};

// The tables compiled into this build, best first, ending with the baseline; null-terminated.
const KernelTable* const* kernel_tables();
// Whether this machine can run a table.
bool is_supported(const KernelTable& table);

// Floats per row of a partial result, and of scratch that `attention` needs.
inline int64_t partial_size(const AttentionShape& shape) {
  return (shape.head_dim + TILE - 1) / TILE * TILE + TILE;
}
inline int64_t attention_scratch(const AttentionShape& shape) {
  const int per_kv = shape.num_query_heads / shape.num_kv_heads;
  const int64_t rows = per_kv > MAX_QUERIES ? per_kv : MAX_QUERIES, size = partial_size(shape);
  return rows * (3 * size + KEY_TILE + 16) + 2 * size * KEY_TILE;
}

}  // namespace eyas
