// Linear layers: one family of kernels for every number of rows.
//
// The unit is a tile: TILE output columns of up to MAX_ROWS rows, whose sums stay in registers while K is
// walked once, in order. Every (row, column) has a lane of its own, so its additions are the
// same whatever the number of rows, and whichever thread has the tile.

namespace eyas {
namespace {

constexpr int64_t ROW_BLOCK_BYTES = 384 * 1024;  // of activations that stay in the L2 cache

// The scales and weights of one group for W of its columns.
template <Format FORMAT>
struct GroupReader {
  using L = Layout<FORMAT>;
  const uint8_t* unit;
  const uint8_t* lines;
  int group;
  int column;  // first of the W

  GroupReader(const uint8_t* unit_, int group_, int part)
      : unit(unit_),
        lines(unit_ + L::HEADER + group_ * L::GROUP_BYTES + part * 4 * W),
        group(group_),
        column(part * W) {}

  F half_at(int index) const {
    return load_as(reinterpret_cast<const Half*>(unit) + index * TILE + column);
  }
  F scale() const {
    if constexpr (is_superblock(FORMAT))
      return mul(half_at(0), load_u8(unit + 64 + group * TILE + column));
    else
      return half_at(group);
  }
  // What is added per input, besides scale * q.
  F minimum() const {
    if constexpr (is_superblock(FORMAT))
      return mul(set1(-1.0f), mul(half_at(1), load_u8(unit + 192 + group * TILE + column)));
    else
      return half_at(L::GROUPS + group);
  }
  I half_scale(int half) const {
    return load_i8(reinterpret_cast<const int8_t*>(unit) + 64 + (2 * group + half) * TILE + column);
  }
  // Step J of 0..3, and step J + 4.
  template <int J>
  void steps(B& low, B& high) const {
    if constexpr (L::BITS == 8) {
      low = load_bytes(lines + LINE * J);
      high = load_bytes(lines + LINE * (J + 4));
    } else {
      const B line = load_bytes(lines + LINE * J);
      low = low_nibbles(line);
      high = high_nibbles(line);
      if constexpr (L::BITS == 5) {
        const B bits = load_bytes(lines + LINE * 4);
        low = either(low, high_bits<J, 1>(bits));
        high = either(high, high_bits<J + 4, 1>(bits));
      } else if constexpr (L::BITS == 6) {
        low = either(low, high_bits<2 * J, 2>(load_bytes(lines + LINE * 4)));
        high = either(high, high_bits<2 * J, 2>(load_bytes(lines + LINE * 5)));
      }
    }
  }
};

template <class Function>
inline void for_four(Function f) {
  f(std::integral_constant<int, 0>());
  f(std::integral_constant<int, 1>());
  f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 3>());
}

// The sums of one group, and what becomes of them: total += scale * (sum of w * x).
template <Format FORMAT, int ROWS>
struct Int8Group {
  using L = Layout<FORMAT>;
  static constexpr bool HALVES = FORMAT == Format::Q6_K;  // each half has its own scale
  Dot<L::BITS> dots[HALVES ? 2 : 1][ROWS][PARTS];

  // Steps J and J + 4 of all rows and columns.
  template <int J>
  void step(const uint8_t* unit, int group, const int8_t* x, int64_t stride) {
    B low[PARTS], high[PARTS];
    for (int p = 0; p < PARTS; ++p)
      GroupReader<FORMAT>(unit, group, p).template steps<J>(low[p], high[p]);
    for (int r = 0; r < ROWS; ++r) {
      const B x_low = broadcast4(x + r * stride + 4 * J);
      for (int p = 0; p < PARTS; ++p)
        dots[0][r][p].template step<HALVES ? J : 2 * J>(low[p], x_low);
      const B x_high = broadcast4(x + r * stride + 4 * J + 16);
      for (int p = 0; p < PARTS; ++p)
        dots[HALVES][r][p].template step<HALVES ? J : 2 * J + 1>(high[p], x_high);
    }
  }

  void add_to(F (&total)[ROWS][PARTS], const uint8_t* unit, int group, const GroupInfo* info,
              int64_t stride) {
    for (int p = 0; p < PARTS; ++p) {
      const GroupReader<FORMAT> reader(unit, group, p);
      F d, minimum = zero();
      if constexpr (HALVES)
        d = reader.half_at(0);
      else
        d = reader.scale();
      if constexpr (L::MIN) minimum = reader.minimum();
      for (int r = 0; r < ROWS; ++r) {
        const GroupInfo& i = info[r * stride];
        F sum;
        if constexpr (HALVES) {
          const I low = add(dots[0][r][p].done(), set1_int(-L::ZERO * i.low_sum));
          const I high = add(dots[1][r][p].done(), set1_int(-L::ZERO * i.high_sum));
          sum = to_float(add(mul(low, reader.half_scale(0)), mul(high, reader.half_scale(1))));
        } else {
          sum = to_float(dots[0][r][p].done());
          // What makes weights unsigned is taken out again: below 2^24 in all, so exactly.
          if constexpr (L::ZERO == 128 && Dot<L::BITS>::OFFSET)
            sum = add(sum, set1(i.offset));
          else if constexpr (L::ZERO > 0 && Dot<L::BITS>::OFFSET)
            sum = fma(set1(i.offset), set1(L::ZERO / 128.0f), sum);
        }
        total[r][p] = fma(sum, mul(d, set1(i.scale)), total[r][p]);
        if constexpr (L::MIN) total[r][p] = fma(minimum, set1(i.sum), total[r][p]);
      }
    }
  }
};

// int8 activations: an exact integer sum inside each group, one multiply-add per group in float32.
template <Format FORMAT, int ROWS>
void int8_tile(const LinearArgs& args, const uint8_t* panel, int64_t row, float* sums) {
  using L = Layout<FORMAT>;
  const int groups = static_cast<int>(args.weight->num_inputs / GROUP);
  const int64_t stride = args.xq.stride, info_stride = args.xq.info_stride;
  const int8_t* x = args.xq.data + row * stride;
  const GroupInfo* info = args.xq.info + row * info_stride;
  F total[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) total[r][p] = zero();
  for (int done = 0; done < groups; done += L::GROUPS, panel += L::UNIT_BYTES) {
    const int count = groups - done < L::GROUPS ? groups - done : L::GROUPS;
    for (int g = 0; g < count; ++g, x += GROUP, ++info) {
      Int8Group<FORMAT, ROWS> group;
      for_four([&](auto j) { group.template step<decltype(j)::value>(panel, g, x, stride); });
      group.add_to(total, panel, g, info, info_stride);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) store(sums + r * TILE + p * W, total[r][p]);
}

// float32 activations and quantised weights: each weight at exactly its stored value, input by input.
template <Format FORMAT, int ROWS>
void float_tile_quantised(const LinearArgs& args, const uint8_t* panel, int64_t row, float* sums) {
  using L = Layout<FORMAT>;
  const int groups = static_cast<int>(args.weight->num_inputs / GROUP);
  const float* x = args.x.data + row * args.x.stride;
  F total[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) total[r][p] = zero();

  for (int done = 0; done < groups; done += L::GROUPS, panel += L::UNIT_BYTES) {
    const int count = groups - done < L::GROUPS ? groups - done : L::GROUPS;
    for (int g = 0; g < count; ++g, x += GROUP) {
      for (int p = 0; p < PARTS; ++p) {
        const GroupReader<FORMAT> reader(panel, g, p);
        F scale[2], minimum = zero();
        if constexpr (FORMAT == Format::Q6_K) {
          for (int half = 0; half < 2; ++half)
            scale[half] = mul(reader.half_at(0), to_float(reader.half_scale(half)));
        } else {
          scale[0] = scale[1] = reader.scale();
        }
        if constexpr (L::MIN) minimum = reader.minimum();
        const auto input = [&](F q, int half, int k) {
          F w = mul(sub(q, set1(static_cast<float>(L::ZERO))), scale[half]);
          if constexpr (L::MIN) w = add(w, minimum);
          for (int r = 0; r < ROWS; ++r)
            total[r][p] = fma(w, set1(x[r * args.x.stride + k]), total[r][p]);
        };
        const auto half_group = [&](auto half_constant) {
          constexpr int HALF = decltype(half_constant)::value;
          for_four([&](auto j) {
            constexpr int J = decltype(j)::value;
            B low, high;
            reader.template steps<J>(low, high);
            const B bytes = HALF ? high : low;
            input(byte_as_float<0>(bytes), HALF, 16 * HALF + 4 * J);
            input(byte_as_float<1>(bytes), HALF, 16 * HALF + 4 * J + 1);
            input(byte_as_float<2>(bytes), HALF, 16 * HALF + 4 * J + 2);
            input(byte_as_float<3>(bytes), HALF, 16 * HALF + 4 * J + 3);
          });
        };
        half_group(std::integral_constant<int, 0>());
        half_group(std::integral_constant<int, 1>());
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) store(sums + r * TILE + p * W, total[r][p]);
}

// Float weights: input by input.
template <class T, int ROWS>
void float_tile(const LinearArgs& args, const uint8_t* panel, int64_t row, float* sums) {
  const T* weights = reinterpret_cast<const T*>(panel);
  const int64_t num_inputs = args.weight->num_inputs;
  const float* x = args.x.data + row * args.x.stride;
  F total[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) total[r][p] = zero();
  for (int64_t k = 0; k < num_inputs; ++k, weights += TILE) {
    F w[PARTS];
    for (int p = 0; p < PARTS; ++p) w[p] = load_as(weights + p * W);
    for (int r = 0; r < ROWS; ++r) {
      const F x_rk = set1(x[r * args.x.stride + k]);
      for (int p = 0; p < PARTS; ++p) total[r][p] = fma(w[p], x_rk, total[r][p]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) store(sums + r * TILE + p * W, total[r][p]);
}

// Bias, residual, and the columns that exist.
inline void write_tile(const LinearArgs& args, int64_t tile, int64_t row, int num_rows,
                       const float* sums) {
  const int64_t column = tile * TILE;
  const int64_t left = args.weight->num_outputs - column;
  for (int r = 0; r < num_rows; ++r) {
    float* out = args.out.data + (row + r) * args.out.stride + column;
    for (int p = 0; p < PARTS && p * W < left; ++p) {
      const int n = left - p * W < W ? static_cast<int>(left - p * W) : W;
      F sum = load(sums + r * TILE + p * W);
      if (args.weight->bias) sum = add(sum, load(args.weight->bias + column + p * W));
      if (args.accumulate) sum = add(load_n(out + p * W, n), sum);
      store_n(out + p * W, sum, n);
    }
  }
}

using TileKernel = void (*)(const LinearArgs&, const uint8_t*, int64_t, float*);

template <Format FORMAT>
struct Int8Family {
  template <int ROWS>
  static constexpr TileKernel kernel = int8_tile<FORMAT, ROWS>;
};
template <Format FORMAT>
struct FloatQuantisedFamily {
  template <int ROWS>
  static constexpr TileKernel kernel = float_tile_quantised<FORMAT, ROWS>;
};
template <class T>
struct FloatFamily {
  template <int ROWS>
  static constexpr TileKernel kernel = float_tile<T, ROWS>;
};

template <class Family, int... ROWS>
void run_tiles(const LinearArgs& args, int64_t tile_begin, int64_t tile_end, int64_t row_bytes,
               std::integer_sequence<int, ROWS...>) {
  static constexpr TileKernel kernels[] = {Family::template kernel<ROWS + 1>...};
  constexpr int64_t max_rows = sizeof...(ROWS);
  int64_t block = ROW_BLOCK_BYTES / row_bytes / max_rows * max_rows;
  if (block < max_rows) block = max_rows;
  alignas(ALIGN) float sums[max_rows * TILE];
  for (int64_t begin = 0; begin < args.num_rows; begin += block) {
    const int64_t end = begin + block < args.num_rows ? begin + block : args.num_rows;
    // Even parts: a last part of one row would cost nearly as much as a full one.
    const int64_t parts = (end - begin + max_rows - 1) / max_rows;
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const uint8_t* panel = args.weight->panels + tile * args.weight->panel_bytes;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t row = begin + (end - begin) * part / parts;
        const int num_rows = static_cast<int>(begin + (end - begin) * (part + 1) / parts - row);
        kernels[num_rows - 1](args, panel, row, sums);
        write_tile(args, tile, row, num_rows, sums);
      }
    }
  }
}

template <Format FORMAT>
void linear_quantised(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t num_inputs = args.weight->num_inputs;
  if (args.quantised)
    run_tiles<Int8Family<FORMAT>>(args, begin, end, num_inputs,
                                  std::make_integer_sequence<int, MAX_ROWS_INT8>());
  else
    run_tiles<FloatQuantisedFamily<FORMAT>>(args, begin, end, 4 * num_inputs,
                                            std::make_integer_sequence<int, MAX_ROWS_INT8>());
}

template <class T>
void linear_float(const LinearArgs& args, int64_t begin, int64_t end) {
  run_tiles<FloatFamily<T>>(args, begin, end, 4 * args.weight->num_inputs,
                            std::make_integer_sequence<int, MAX_ROWS_FLOAT>());
}

void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  switch (args.weight->format) {
    case Format::F32: return linear_float<float>(args, begin, end);
    case Format::F16: return linear_float<Half>(args, begin, end);
    case Format::BF16: return linear_float<BFloat>(args, begin, end);
    case Format::Q4_0: return linear_quantised<Format::Q4_0>(args, begin, end);
    case Format::Q4_1: return linear_quantised<Format::Q4_1>(args, begin, end);
    case Format::Q5_0: return linear_quantised<Format::Q5_0>(args, begin, end);
    case Format::Q5_1: return linear_quantised<Format::Q5_1>(args, begin, end);
    case Format::Q8_0: return linear_quantised<Format::Q8_0>(args, begin, end);
    case Format::Q4_K: return linear_quantised<Format::Q4_K>(args, begin, end);
    case Format::Q5_K: return linear_quantised<Format::Q5_K>(args, begin, end);
    case Format::Q6_K: return linear_quantised<Format::Q6_K>(args, begin, end);
  }
}

}  // namespace
}  // namespace eyas
