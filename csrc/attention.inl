// Attention over paged keys and values, with an online softmax (Milakov and Gimelshein 2018).
//
// A row walks the keys that it sees in tiles of KEY_TILE at absolute positions, in order. Spans of
// KEY_SPAN keys start afresh and are merged in order, so that another thread may compute a span. A
// key that a row does not see is never read into its sums: scores are selected away and values
// skipped. Which rows are computed together decides nothing but the speed.

namespace eyas {
namespace {

#if defined(EYAS_AVX512)
constexpr int ATTENTION_ROWS = 8, ATTENTION_SUMS = 16;
#elif defined(EYAS_AVX2)
constexpr int ATTENTION_ROWS = 4, ATTENTION_SUMS = 8;
#elif defined(EYAS_NEON)
constexpr int ATTENTION_ROWS = 4, ATTENTION_SUMS = 16;
#else
constexpr int ATTENTION_ROWS = 2, ATTENTION_SUMS = 4;
#endif

constexpr int TILE_GROUPS = KEY_TILE / TILE;

inline int padded(int head_dim) { return (head_dim + TILE - 1) / TILE * TILE; }

// One tile's keys and values, wherever they are: per 16 keys, a key's input d at
// keys[group][d * key_stride + i], a value at values[group][i * value_stride + d]. The next tile's are
// asked for while this one's are used: their pieces are too short for the hardware to guess.
template <class T>
struct TileView {
  const T* keys[TILE_GROUPS];
  const T* values[TILE_GROUPS];
  const T* next_keys[TILE_GROUPS];
  const T* next_values[TILE_GROUPS];
  int64_t key_stride, value_stride;
};

struct RowRange {  // the keys of the tile that a row sees
  int low, high;
};

// A row's softmax so far: the largest score, the sum of exp(score - largest), and the same sum
// weighted by the values. A sum of 0 has seen no key.
struct RowState {
  float* values;  // [padded(head_dim)], then largest, then sum
  int size;
  float& largest() const { return values[size]; }
  float& sum() const { return values[size + 1]; }
};

template <class T, int ROWS, int GROUPS>
void score_block(const TileView<T>& tile, int group, const float* q, int head_dim, int q_stride,
                 float* scores) {
  F sum[ROWS][GROUPS][PARTS];
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g)
      for (int p = 0; p < PARTS; ++p) sum[r][g][p] = zero();
  for (int d = 0; d < head_dim; ++d) {
    F key[GROUPS][PARTS];
    for (int g = 0; g < GROUPS; ++g)
      for (int p = 0; p < PARTS; ++p)
        key[g][p] = load_as(tile.keys[group + g] + d * tile.key_stride + p * W);
    if (sizeof(T) == 4 || d % 2 == 0)
      for (int g = 0; g < GROUPS; ++g)
        __builtin_prefetch(tile.next_keys[group + g] + d * tile.key_stride);
    for (int r = 0; r < ROWS; ++r) {
      const F x = set1(q[r * q_stride + d]);
      for (int g = 0; g < GROUPS; ++g)
        for (int p = 0; p < PARTS; ++p) sum[r][g][p] = fma(x, key[g][p], sum[r][g][p]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g)
      for (int p = 0; p < PARTS; ++p)
        store(scores + r * KEY_TILE + (group + g) * TILE + p * W, sum[r][g][p]);
}

template <class T, int ROWS>
void score_rows(const TileView<T>& tile, int group_begin, int group_end, const float* q,
                int head_dim, int q_stride, float* scores) {
  constexpr int MANY = ATTENTION_SUMS / (ROWS * PARTS);
  constexpr int GROUPS = MANY < 1 ? 1 : MANY > TILE_GROUPS ? TILE_GROUPS : MANY;
  int group = group_begin;
  for (; group + GROUPS <= group_end; group += GROUPS)
    score_block<T, ROWS, GROUPS>(tile, group, q, head_dim, q_stride, scores);
  for (; group < group_end; ++group)
    score_block<T, ROWS, 1>(tile, group, q, head_dim, q_stride, scores);
}

template <class T, int ROWS, int VECTORS>
void value_block(const TileView<T>& tile, RowRange range, const float* weights, int d,
                 const RowState* states) {
  F sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(states[r].values + d + v * W);
  for (int key = range.low; key < range.high; ++key) {
    const T* values = tile.values[key / TILE] + (key % TILE) * tile.value_stride + d;
    F value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = load_as(values + v * W);
    const T* next = tile.next_values[key / TILE] + (key % TILE) * tile.value_stride + d;
    for (int at = 0; at < VECTORS * W; at += LINE / static_cast<int>(sizeof(T)))
      __builtin_prefetch(next + at);
    for (int r = 0; r < ROWS; ++r) {
      const F weight = set1(weights[r * KEY_TILE + key]);
      for (int v = 0; v < VECTORS; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(states[r].values + d + v * W, sum[r][v]);
}

template <class T, int ROWS>
void value_rows(const TileView<T>& tile, RowRange range, const float* weights,
                const RowState* states) {
  constexpr int MANY = ATTENTION_SUMS / ROWS;
  constexpr int VECTORS = MANY > 4 ? 4 : MANY;
  const int size = states[0].size;
  int d = 0;
  for (; d + VECTORS * W <= size; d += VECTORS * W)
    value_block<T, ROWS, VECTORS>(tile, range, weights, d, states);
  for (; d < size; d += W) value_block<T, ROWS, 1>(tile, range, weights, d, states);
}

// Scores become weights exp(score - largest); the state's largest, sum and values follow.
inline void softmax_row(float* scores, RowRange range, const RowState& state) {
  const int begin = range.low / W * W;
  F best = set1(-__builtin_inff());
  for (int k = begin; k < range.high; k += W)
    best = max(best, select_range(load(scores + k), set1(-__builtin_inff()),
                                  range.low > k ? range.low - k : 0,
                                  range.high - k < W ? range.high - k : W));
  const float before = state.largest();
  const float tile_best = max_lanes(best);
  const float largest = before > tile_best ? before : tile_best;
  F sum = zero();
  for (int k = begin; k < range.high; k += W) {
    const F weight = select_range(exp(sub(load(scores + k), set1(largest))), zero(),
                                  range.low > k ? range.low - k : 0,
                                  range.high - k < W ? range.high - k : W);
    store(scores + k, weight);
    sum = add(sum, weight);
  }
  float keep[W];
  store(keep, exp(set1(before - largest)));
  if (state.sum() == 0.0f) {
    state.sum() = sum_lanes(sum);
  } else {
    const F factor = set1(keep[0]);
    state.sum() = state.sum() * keep[0] + sum_lanes(sum);
    for (int d = 0; d < state.size; d += W)
      store(state.values + d, mul(load(state.values + d), factor));
  }
  state.largest() = largest;
}

template <class T, int... ROWS>
void run_tile(const TileView<T>& tile, int group_begin, int group_end, const RowRange* ranges,
              int num_rows, const float* q, int head_dim, int q_stride, float* scores,
              const RowState* states, std::integer_sequence<int, ROWS...>) {
  using Score = void (*)(const TileView<T>&, int, int, const float*, int, int, float*);
  using Value = void (*)(const TileView<T>&, RowRange, const float*, const RowState*);
  static constexpr Score score[] = {score_rows<T, ROWS + 1>...};
  static constexpr Value value[] = {value_rows<T, ROWS + 1>...};
  constexpr int most = sizeof...(ROWS);
  for (int row = 0; row < num_rows; row += most) {
    const int count = num_rows - row < most ? num_rows - row : most;
    score[count - 1](tile, group_begin, group_end, q + row * q_stride, head_dim, q_stride,
                     scores + row * KEY_TILE);
  }
  for (int row = 0; row < num_rows; ++row)
    if (ranges[row].low < ranges[row].high)
      softmax_row(scores + row * KEY_TILE, ranges[row], states[row]);
  for (int row = 0; row < num_rows;) {
    int count = 1;  // rows that see the same keys
    while (count < most && row + count < num_rows && ranges[row + count].low == ranges[row].low &&
           ranges[row + count].high == ranges[row].high)
      ++count;
    if (ranges[row].low < ranges[row].high)
      value[count - 1](tile, ranges[row], scores + row * KEY_TILE, states + row);
    row += count;
  }
}

// state := state and then `next`, a later span's.
inline void merge_state(const RowState& state, const RowState& next) {
  if (next.sum() == 0.0f) return;
  if (state.sum() == 0.0f) {
    for (int d = 0; d < state.size + TILE; d += W) store(state.values + d, load(next.values + d));
    return;
  }
  const float largest = state.largest() > next.largest() ? state.largest() : next.largest();
  const F keep = exp(set1(state.largest() - largest)), bring = exp(set1(next.largest() - largest));
  for (int d = 0; d < state.size; d += W)
    store(state.values + d,
          fma(load(next.values + d), bring, mul(load(state.values + d), keep)));
  float factor[2][W];
  store(factor[0], keep);
  store(factor[1], bring);
  state.sum() = state.sum() * factor[0][0] + next.sum() * factor[1][0];
  state.largest() = largest;
}

inline void write_result(const RowState& state, int head_dim, float* out) {
  const F sum = set1(state.sum());
  for (int d = 0; d < head_dim; d += W)
    store_n(out + d, div(load(state.values + d), sum), head_dim - d < W ? head_dim - d : W);
}

inline int64_t block_of(const AttentionRow& row, int64_t position, int block_size) {
  return row.blocks[position / block_size - row.first_block];
}

// Where the tile's keys [low, high) are. If 16 keys aren't consecutive in a block, or a vector of
// values would end past its slot, they are gathered. Positions up to `last_position` have a block.
template <class T, class Run>
void with_tile(const AttentionArgs& args, const AttentionRow& row, int64_t last_position, int kv_head,
               int64_t first_key, int low, int high, float* gathered, Run run) {
  const int head_dim = args.shape.head_dim, heads = args.shape.num_kv_heads;
  const int64_t size = args.block_size;
  const T* keys = static_cast<const T*>(args.kv.keys);
  const T* values = static_cast<const T*>(args.kv.values);
  if (size % TILE == 0 && head_dim % TILE == 0) {
    TileView<T> tile;
    tile.key_stride = size;
    tile.value_stride = head_dim;
    for (int g = low / TILE; g * TILE < high; ++g) {
      const int64_t position = first_key + g * TILE;
      const int64_t base = (block_of(row, position, args.block_size) * heads + kv_head) * size *
                           head_dim;
      tile.keys[g] = keys + base + position % size;
      tile.values[g] = values + base + position % size * head_dim;
      tile.next_keys[g] = tile.keys[g];
      tile.next_values[g] = tile.values[g];
      const int64_t next = position + KEY_TILE;
      if (next > last_position) continue;
      const int64_t next_base =
          (block_of(row, next, args.block_size) * heads + kv_head) * size * head_dim;
      tile.next_keys[g] = keys + next_base + next % size;
      tile.next_values[g] = values + next_base + next % size * head_dim;
    }
    run(tile);
    return;
  }
  TileView<float> tile;
  tile.key_stride = KEY_TILE;
  tile.value_stride = padded(head_dim);
  float* gathered_values = gathered + head_dim * KEY_TILE;
  for (int g = 0; g < TILE_GROUPS; ++g) {
    tile.keys[g] = tile.next_keys[g] = gathered + g * TILE;
    tile.values[g] = tile.next_values[g] = gathered_values + g * TILE * tile.value_stride;
  }
  for (int key = low; key < high; ++key) {
    const int64_t position = first_key + key;
    const int64_t base =
        (block_of(row, position, args.block_size) * heads + kv_head) * size * head_dim;
    const T* from_key = keys + base + position % size;
    const T* from_value = values + base + position % size * head_dim;
    float* to_value = gathered_values + key * tile.value_stride;
    for (int d = 0; d < head_dim; ++d) {
      gathered[d * KEY_TILE + key] = to_f32(from_key[d * size]);
      to_value[d] = to_f32(from_value[d]);
    }
    for (int d = head_dim; d < tile.value_stride; ++d) to_value[d] = 0.0f;
  }
  run(tile);
}

template <class T>
void attend(const AttentionArgs& args, const AttentionTask& task, float* scratch) {
  const int head_dim = args.shape.head_dim, size = padded(head_dim);
  const int per_kv = args.shape.num_query_heads / args.shape.num_kv_heads;
  const int num_rows = task.num_tokens * per_kv, state_size = size + TILE;
  const AttentionRow* rows = args.rows + task.row;
  float* q = scratch;
  float* scores = q + num_rows * size;
  float* span_values = scores + num_rows * KEY_TILE;
  float* total_values = span_values + num_rows * state_size;
  float* gathered = total_values + num_rows * state_size;
  RowState* spans = reinterpret_cast<RowState*>(gathered + (head_dim + size) * KEY_TILE);
  RowState* totals = spans + num_rows;
  RowRange* ranges = reinterpret_cast<RowRange*>(totals + num_rows);

  const int64_t last = rows[task.num_tokens - 1].position;
  for (int r = 0; r < num_rows; ++r) {
    const float* from = args.q.data + (task.row + r / per_kv) * args.q.stride +
                        (task.kv_head * per_kv + r % per_kv) * head_dim;
    for (int d = 0; d < head_dim; d += W) {
      const int n = head_dim - d < W ? head_dim - d : W;
      store(q + r * size + d, mul(load_n(from + d, n), set1(args.scale)));
    }
    totals[r] = {total_values + r * state_size, size};
    totals[r].sum() = 0.0f;
  }
  for (int64_t span = task.span_begin; span < task.span_end; ++span) {
    for (int r = 0; r < num_rows; ++r) {
      float* values = task.partial < 0
                          ? span_values + r * state_size
                          : args.partials + (task.partial + (span - task.span_begin) * num_rows + r) *
                                                state_size;
      spans[r] = {values, size};
      for (int d = 0; d < size; d += W) store(values + d, zero());
      spans[r].largest() = -__builtin_inff();
      spans[r].sum() = 0.0f;
    }
    for (int t = 0; t < KEY_SPAN / KEY_TILE; ++t) {
      const int64_t first_key = span * KEY_SPAN + t * KEY_TILE;
      int low = KEY_TILE, high = 0;
      for (int r = 0; r < num_rows; ++r) {
        const AttentionRow& row = rows[r / per_kv];
        const int64_t from = row.first_visible - first_key, to = row.position + 1 - first_key;
        ranges[r].low = static_cast<int>(from < 0 ? 0 : from > KEY_TILE ? KEY_TILE : from);
        ranges[r].high = static_cast<int>(to < 0 ? 0 : to > KEY_TILE ? KEY_TILE : to);
        if (ranges[r].low >= ranges[r].high) continue;
        low = ranges[r].low < low ? ranges[r].low : low;
        high = ranges[r].high > high ? ranges[r].high : high;
      }
      if (low >= high) continue;
      with_tile<T>(args, rows[0], last, task.kv_head, first_key, low, high, gathered,
                   [&](auto& tile) {
        run_tile(tile, low / TILE, (high + TILE - 1) / TILE, ranges, num_rows, q, head_dim, size,
                 scores, spans, std::make_integer_sequence<int, ATTENTION_ROWS>());
      });
    }
    if (task.partial < 0)
      for (int r = 0; r < num_rows; ++r) merge_state(totals[r], spans[r]);
  }
  if (task.partial >= 0) return;
  for (int r = 0; r < num_rows; ++r)
    write_result(totals[r], head_dim,
                 args.out.data + (task.row + r / per_kv) * args.out.stride +
                     (task.kv_head * per_kv + r % per_kv) * head_dim);
}

void attention(const AttentionArgs& args, const AttentionTask& task, float* scratch) {
  switch (args.kv.type) {
    case KVType::F32: return attend<float>(args, task, scratch);
    case KVType::F16: return attend<Half>(args, task, scratch);
    case KVType::BF16: return attend<BFloat>(args, task, scratch);
  }
}

void merge(const AttentionArgs& args, const float* partials, int64_t stride, int num_spans,
           float* out) {
  const int head_dim = args.shape.head_dim, size = padded(head_dim);
  alignas(ALIGN) float values[MAX_HEAD_DIM + TILE];
  const RowState total{values, size};
  total.sum() = 0.0f;
  for (int i = 0; i < num_spans; ++i)
    merge_state(total, {const_cast<float*>(partials) + i * stride, size});
  write_result(total, head_dim, out);
}

template <class T>
void write_rows(const AttentionArgs& args, int64_t begin, int64_t end) {
  const int head_dim = args.shape.head_dim, heads = args.shape.num_kv_heads;
  const int64_t size = args.block_size;
  for (int64_t r = begin; r < end; ++r) {
    const AttentionRow& row = args.rows[r];
    const int64_t block = block_of(row, row.position, args.block_size);
    const int64_t offset = row.position % size;
    for (int head = 0; head < heads; ++head) {
      const float* k = args.k.data + r * args.k.stride + head * head_dim;
      const float* v = args.v.data + r * args.v.stride + head * head_dim;
      const int64_t base = (block * heads + head) * size * head_dim;
      T* keys = static_cast<T*>(args.kv.keys) + base + offset;
      T* values = static_cast<T*>(args.kv.values) + base + offset * head_dim;
      int d = 0;
      for (; d + W <= head_dim; d += W) {
        T rounded[W];
        store_as(rounded, load(k + d));
        for (int i = 0; i < W; ++i) keys[(d + i) * size] = rounded[i];
        store_as(values + d, load(v + d));
      }
      for (; d < head_dim; ++d) {
        from_f32(k[d], keys[d * size]);
        from_f32(v[d], values[d]);
      }
    }
  }
}

void write_kv(const AttentionArgs& args, int64_t begin, int64_t end) {
  switch (args.kv.type) {
    case KVType::F32: return write_rows<float>(args, begin, end);
    case KVType::F16: return write_rows<Half>(args, begin, end);
    case KVType::BF16: return write_rows<BFloat>(args, begin, end);
  }
}

}  // namespace
}  // namespace eyas
