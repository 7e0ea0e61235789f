// Paged attention through plans: random block tables with NaN wherever no row looks, cut for several
// numbers of threads, each row against itself alone and against double precision.
#include <algorithm>
#include <limits>

#include "plan.h"
#include "weights.h"

namespace eyas::test {
namespace {

struct Request {
  int64_t row, num_tokens, position;
  int64_t first_seen;   // the first position that a row of it sees
  int64_t first_block;
  std::vector<int32_t> blocks;
};

struct Case {
  AttentionShape shape;
  int block_size;
  int64_t window;
  KVType type;
  std::vector<Request> requests;
  int64_t num_rows = 0, num_blocks = 0;
  bool sees(int64_t row_position, int64_t key) const {
    return key <= row_position && (!window || key > row_position - window);
  }
  int64_t first_seen(int64_t position) const {
    int64_t key = position;
    while (key > 0 && sees(position, key - 1)) --key;
    return key;
  }
  int64_t element_bytes() const { return type == KVType::F32 ? 4 : 2; }
};

// Exactly the cache's bytes, every slot NaN at first.
struct Cache {
  const Case& c;
  std::vector<uint8_t> keys, values;
  explicit Cache(const Case& c_) : c(c_) {
    const auto size = static_cast<size_t>(c.num_blocks * c.shape.num_kv_heads * c.block_size *
                                          c.shape.head_dim * c.element_bytes());
    keys.resize(size);
    for (size_t i = 0; i < size; i += static_cast<size_t>(c.element_bytes())) {
      const uint32_t nan = c.type == KVType::F32 ? 0x7fc00001u : c.type == KVType::F16 ? 0x7e01u
                                                                                       : 0x7fc1u;
      std::memcpy(keys.data() + i, &nan, static_cast<size_t>(c.element_bytes()));
    }
    values = keys;
  }
  KVLayer layer() { return {c.type, keys.data(), values.data()}; }
  int64_t slot(int64_t block, int head) const {
    return (block * c.shape.num_kv_heads + head) * c.block_size * c.shape.head_dim;
  }
  int64_t key_at(int64_t block, int head, int64_t offset, int d) const {
    return slot(block, head) + d * c.block_size + offset;
  }
  int64_t value_at(int64_t block, int head, int64_t offset, int d) const {
    return slot(block, head) + offset * c.shape.head_dim + d;
  }
  double read(const std::vector<uint8_t>& from, int64_t at) const {
    if (c.type == KVType::F32) {
      float x;
      std::memcpy(&x, from.data() + 4 * at, 4);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, from.data() + 2 * at, 2);
    return c.type == KVType::F16 ? half_value(bits) : bfloat_value(bits);
  }
};

int64_t block_of(const Case& c, const Request& r, int64_t position) {
  return r.blocks[static_cast<size_t>(position / c.block_size - r.first_block)];
}

Case random_case(Random& random) {
  Case c;
  const int per_kv = random.one_in(12) ? random.small(33, 40) : random.small(1, 8);
  c.shape.num_kv_heads = random.small(1, 3);
  c.shape.num_query_heads = c.shape.num_kv_heads * per_kv;
  c.shape.head_dim = random.one_in(2) ? 16 * random.small(1, 8) : random.small(1, 100);
  c.block_size = random.one_in(2) ? 16 * random.small(1, 12) : random.small(1, 200);
  c.window = random.one_in(3) ? random.between(1, 200) : 0;
  c.type = random.pick({KVType::F32, KVType::F16, KVType::BF16});
  std::vector<int32_t> free;
  const int num_requests = random.small(1, 3);
  for (int i = 0; i < num_requests; ++i) {
    Request r{};
    r.row = c.num_rows;
    r.num_tokens = random.one_in(8) ? 0 : random.one_in(2) ? 1 : random.between(1, 70);
    r.position = random.one_in(3) ? 0 : random.between(0, random.one_in(2) ? 40 : 600);
    r.first_seen = c.first_seen(r.position);
    r.first_block = random.between(0, r.first_seen / c.block_size);
    const int64_t end = (r.position + r.num_tokens + c.block_size - 1) / c.block_size;
    r.blocks.resize(static_cast<size_t>(std::max<int64_t>(0, end - r.first_block)));
    c.num_rows += r.num_tokens;
    c.num_blocks += static_cast<int64_t>(r.blocks.size());
    c.requests.push_back(r);
  }
  c.num_blocks += random.between(0, 2);
  for (int64_t i = 0; i < c.num_blocks; ++i) free.push_back(static_cast<int32_t>(i));
  random.shuffle(free);
  for (Request& r : c.requests)
    for (int32_t& block : r.blocks) {
      block = free.back();
      free.pop_back();
    }
  return c;
}

std::vector<Span> spans_of(const Case& c) {
  std::vector<Span> spans;
  for (const Request& r : c.requests)
    spans.push_back({r.row, r.num_tokens, r.position, r.first_block, r.blocks});
  return spans;
}

AttentionArgs args_for(const Case& c, const AttentionPlan& plan, Cache& cache) {
  AttentionArgs args{};
  args.shape = c.shape;
  args.block_size = c.block_size;
  args.rows = plan.rows.data();
  args.kv = cache.layer();
  args.scale = 1.0f / std::sqrt(static_cast<float>(c.shape.head_dim));
  return args;
}

// Keys and values of every position that a row sees, written through the kernel: the positions before
// a request's rows as rows of a plan of their own.
void write_cache(const KernelTable& table, Random& random, const Case& c, Cache& cache) {
  const int64_t width = c.shape.num_kv_heads * c.shape.head_dim;
  for (const Request& r : c.requests) {
    const int64_t num = r.position + r.num_tokens - r.first_seen;
    if (r.num_tokens == 0) continue;
    const AttentionPlan plan(c.shape, c.block_size, 0,
                             {{0, num, r.first_seen, r.first_block, r.blocks}}, 1);
    Matrix k(num, width, random.between(0, 3)), v(num, width, random.between(0, 3));
    for (Matrix* m : {&k, &v})
      for (int64_t i = 0; i < num; ++i)
        for (int64_t d = 0; d < width; ++d) m->row(i)[d] = 3.0f * random.value();
    AttentionArgs args = args_for(c, plan, cache);
    args.k = k.view();
    args.v = v.view();
    const int64_t middle = random.between(0, num);
    table.write_kv(args, middle, num);
    table.write_kv(args, 0, middle);
    // Rounded to nearest: by at most half a unit in the last place.
    const double unit = c.type == KVType::F32 ? 0 : c.type == KVType::F16 ? 0x1p-11 : 0x1p-8;
    for (int64_t i = 0; i < num; ++i)
      for (int64_t d = 0; d < width; ++d) {
        const int64_t p = r.first_seen + i, block = block_of(c, r, p), offset = p % c.block_size;
        const int head = static_cast<int>(d / c.shape.head_dim);
        const int in_head = static_cast<int>(d % c.shape.head_dim);
        const double stored[2] = {
            cache.read(cache.keys, cache.key_at(block, head, offset, in_head)),
            cache.read(cache.values, cache.value_at(block, head, offset, in_head))};
        const float from[2] = {k.row(i)[d], v.row(i)[d]};
        for (int j = 0; j < 2; ++j)
          check_near(from[j], stored[j], unit * std::fabs(from[j]) + (unit ? 0x1p-25 : 0),
                     "write_kv");
      }
  }
}

void check_nothing_else_written(const Case& c, const Cache& cache) {
  int64_t finite = 0, expected = 0;
  const auto size = static_cast<int64_t>(cache.keys.size()) / c.element_bytes();
  for (int64_t at = 0; at < size; ++at)
    finite += !std::isnan(cache.read(cache.keys, at)) + !std::isnan(cache.read(cache.values, at));
  for (const Request& r : c.requests)
    if (r.num_tokens)
      expected += 2 * (r.position + r.num_tokens - r.first_seen) * c.shape.num_kv_heads *
                  c.shape.head_dim;
  if (finite != expected) fail("write_kv: wrote other slots");
}

// A copy of the cache in which only what `position` of `request` sees is not NaN.
Cache only_seen(const Case& c, const Cache& cache, const Request& r, int64_t position) {
  Cache copy(c);
  const auto bytes = static_cast<size_t>(c.element_bytes());
  for (int64_t p = c.first_seen(position); p <= position; ++p)
    for (int head = 0; head < c.shape.num_kv_heads; ++head)
      for (int d = 0; d < c.shape.head_dim; ++d) {
        const int64_t block = block_of(c, r, p), offset = p % c.block_size;
        const auto key = static_cast<size_t>(cache.key_at(block, head, offset, d)) * bytes;
        const auto value = static_cast<size_t>(cache.value_at(block, head, offset, d)) * bytes;
        std::memcpy(copy.keys.data() + key, cache.keys.data() + key, bytes);
        std::memcpy(copy.values.data() + value, cache.values.data() + value, bytes);
      }
  return copy;
}

void attend(const KernelTable& table, Random& random, const Case& c, Cache& cache,
            std::vector<Span> spans, int num_threads, Rows q, Matrix& out) {
  const AttentionPlan plan(c.shape, c.block_size, c.window, std::move(spans), num_threads);
  std::vector<float> scratch(static_cast<size_t>(attention_scratch(c.shape)), NAN);
  std::vector<float> partials(static_cast<size_t>(plan.partial_floats), NAN);
  AttentionArgs args = args_for(c, plan, cache);
  args.q = q;
  args.out = out.view();
  args.partials = partials.data();
  std::vector<AttentionTask> tasks = plan.tasks;
  random.shuffle(tasks);
  for (const AttentionTask& task : tasks) table.attention(args, task, scratch.data());
  for (const MergeItem& item : plan.merges)
    table.merge(args, partials.data() + item.partial, item.stride, item.num_spans,
                out.row(item.row) + item.query_head * c.shape.head_dim);
}

void check_reference(const Case& c, const Cache& cache, const Request& r, int64_t position,
                     const float* q, const float* out) {
  const int per_kv = c.shape.num_query_heads / c.shape.num_kv_heads, dim = c.shape.head_dim;
  const double scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int head = 0; head < c.shape.num_query_heads; ++head) {
    const int kv_head = head / per_kv;
    std::vector<double> scores, sums(static_cast<size_t>(dim), 0.0);
    double largest = -INFINITY, score_error = 0, largest_value = 0, total = 0;
    const int64_t first = c.first_seen(position);
    for (int64_t p = first; p <= position; ++p) {
      double score = 0, size = 0;
      for (int d = 0; d < dim; ++d) {
        const double product =
            q[head * dim + d] * scale *
            cache.read(cache.keys, cache.key_at(block_of(c, r, p), kv_head, p % c.block_size, d));
        score += product;
        size += std::fabs(product);
      }
      scores.push_back(score);
      largest = std::max(largest, score);
      score_error = std::max(score_error, (2 * dim + 4) * UNIT_ROUNDOFF * size);
    }
    for (int64_t p = first; p <= position; ++p) {
      const double weight = std::exp(scores[static_cast<size_t>(p - first)] - largest);
      total += weight;
      for (int d = 0; d < dim; ++d) {
        const double value = cache.read(
            cache.values, cache.value_at(block_of(c, r, p), kv_head, p % c.block_size, d));
        sums[static_cast<size_t>(d)] += weight * value;
        largest_value = std::max(largest_value, std::fabs(value));
      }
    }
    // Each weight is off by its score's error, some roundings of exp and of the sums' rescaling.
    const double relative = 2 * score_error + (2 * static_cast<double>(scores.size()) + 200) *
                                                  UNIT_ROUNDOFF;
    for (int d = 0; d < dim; ++d)
      check_near(out[head * dim + d], sums[static_cast<size_t>(d)] / total,
                 2 * relative * largest_value, "attention");
  }
}

void run_case(const KernelTable& table, Random& random) {
  const Case c = random_case(random);
  if (c.num_rows == 0) return;
  Cache cache(c);
  write_cache(table, random, c, cache);
  check_nothing_else_written(c, cache);
  const int64_t width = c.shape.num_query_heads * c.shape.head_dim;
  Matrix q(c.num_rows, width, random.between(0, 3));
  for (int64_t i = 0; i < c.num_rows; ++i)
    for (int64_t d = 0; d < width; ++d) q.row(i)[d] = 6.0f * random.value();
  Matrix out(c.num_rows, width, random.between(0, 3));
  attend(table, random, c, cache, spans_of(c), 1, q.view(), out);
  out.check_padding("attention");
  for (int threads = 2; threads <= 3; ++threads) {
    Matrix other(c.num_rows, width);
    attend(table, random, c, cache, spans_of(c), threads, q.view(), other);
    for (int64_t i = 0; i < c.num_rows; ++i)
      check_same(other.row(i), out.row(i), width, "attention cut for several threads");
  }
  for (const Request& r : c.requests) {
    for (int64_t i = 0; i < r.num_tokens; ++i) {
      if (i && i != r.num_tokens - 1 && !random.one_in(8)) continue;
      const int64_t position = r.position + i;
      Cache seen = only_seen(c, cache, r, position);
      std::vector<float> own_q(q.row(r.row + i), q.row(r.row + i) + width);
      Matrix alone(1, width);
      attend(table, random, c, seen, {{0, 1, position, r.first_block, r.blocks}},
             random.small(1, 3), {own_q.data(), width}, alone);
      check_same(out.row(r.row + i), alone.row(0), width, "attention of one token");
      check_reference(c, cache, r, position, own_q.data(), alone.row(0));
    }
  }
}

}  // namespace

void test_attention(const KernelTable& table, Run run) {
  for (int i = 0; i < 40 * run.effort; ++i) run_case(table, run.random);
}

}  // namespace eyas::test
