// What works on each row alone: norms, rope, gates, quantisation, embedding.

namespace eyas {
namespace {

// One group of 32 values to int8: scale = max |x| / 127, q = x / scale rounded to even. A group that
// holds NaN or infinity gets a scale of NaN, which every output of the row then shows; one below
// 1e-35, where 127 / max |x| could overflow, is 0.
inline void quantise_group(const float* x, int8_t* q, GroupInfo& info) {
  I largest = set1_int(0);
  for (int k = 0; k < GROUP; k += W) largest = max(largest, magnitude_bits(load(x + k)));
  float limit = as_float(static_cast<uint32_t>(max_lane(largest)));
  if (!(limit < __builtin_inff())) limit = __builtin_nanf("");
  info.scale = limit / 127.0f;
  if (!(limit >= 1e-35f)) {
    std::memset(q, 0, GROUP);
    info.sum = info.scale * 0.0f;
    info.offset = 0.0f;
    info.low_sum = info.high_sum = 0;
    return;
  }
  const F inverse = set1(127.0f / limit);
  I sum[2] = {set1_int(0), set1_int(0)};  // of each half
  for (int k = 0; k < GROUP; k += W) {
    const I rounded = to_int(mul(load(x + k), inverse));
    store_i8(q + k, rounded);
    sum[2 * k / GROUP] = add(sum[2 * k / GROUP], rounded);
  }
  info.low_sum = sum_lanes(sum[0]);
  info.high_sum = sum_lanes(sum[1]);
  const float total = static_cast<float>(info.low_sum + info.high_sum);
  info.sum = info.scale * total;
  info.offset = -128.0f * total;
}

inline void quantise_row(const float* x, const QuantRows& out, int64_t row, int64_t begin,
                         int64_t end) {
  for (int64_t g = begin; g < end; ++g)
    quantise_group(x + g * GROUP, out.data + row * out.stride + g * GROUP,
                   out.info[row * out.info_stride + g]);
}

void quantise(const Rows& x, const QuantRows& out, int64_t size, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    quantise_row(x.data + row * x.stride, out, row, 0, size / GROUP);
}

// x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
void rms_norm(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t whole = args.size / W * W;
  const int tail = static_cast<int>(args.size - whole);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < args.count; ++i) {
      const float* x = args.x.data + row * args.x.stride + i * args.size;
      float* out = args.out.data + row * args.out.stride + i * args.size;
      F squares = zero();
      for (int64_t k = 0; k < whole; k += W) {
        const F v = load(x + k);
        squares = fma(v, v, squares);
      }
      if (tail) {
        const F v = load_n(x + whole, tail);
        squares = fma(v, v, squares);
      }
      const float mean = sum_lanes(squares) / static_cast<float>(args.size);
      const F scale = set1(1.0f / __builtin_sqrtf(mean + args.eps));
      for (int64_t k = 0; k < whole; k += W)
        store(out + k, mul(mul(load(x + k), scale), load(args.weight + k)));
      if (tail)
        store_n(out + whole, mul(mul(load_n(x + whole, tail), scale),
                                 load_n(args.weight + whole, tail)), tail);
    }
    if (args.quant.data)
      quantise_row(args.out.data + row * args.out.stride, args.quant, row, 0,
                   args.size * args.count / GROUP);
  }
}

// Rotates pairs (Su et al. 2021): (a, b) -> (a cos - b sin, b cos + a sin).
void rope(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.head_dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float* cos = args.cos + row * half;
    const float* sin = args.sin + row * half;
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const float* x = args.x.data + row * args.x.stride + head * args.head_dim;
      float* out = args.out.data + row * args.out.stride + head * args.head_dim;
      if (args.interleaved) {
        for (int64_t i = 0; i < half; ++i) {
          const float a = x[2 * i], b = x[2 * i + 1];
          out[2 * i] = a * cos[i] - b * sin[i];
          out[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        continue;
      }
      for (int64_t i = 0; i < half; i += W) {
        const int n = half - i < W ? static_cast<int>(half - i) : W;
        const F a = load_n(x + i, n), b = load_n(x + half + i, n);
        const F c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(out + i, sub(mul(a, c), mul(b, s)), n);
        store_n(out + half + i, add(mul(b, c), mul(a, s)), n);
      }
    }
  }
}

// gate / (1 + exp(-gate)) * up for the groups [group_begin, group_end) of each row.
void silu_mul(const GateArgs& args, int64_t begin, int64_t end, int64_t group_begin,
              int64_t group_end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = args.x.data + row * args.x.stride;
    const float* up = gate + args.size;
    float* out = args.out.data + row * args.out.stride;
    const int64_t last = group_end * GROUP < args.size ? group_end * GROUP : args.size;
    for (int64_t i = group_begin * GROUP; i < last; i += W) {
      const int n = last - i < W ? static_cast<int>(last - i) : W;
      const F g = load_n(gate + i, n);
      const F s = div(g, add(set1(1.0f), exp(sub(zero(), g))));
      store_n(out + i, mul(s, load_n(up + i, n)), n);
    }
    if (args.quant.data) quantise_row(out, args.quant, row, group_begin, group_end);
  }
}

void add_rows(const Rows& x, const Rows& y, const Rows& out, int64_t size, int64_t begin,
              int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t i = 0; i < size; i += W) {
      const int n = size - i < W ? static_cast<int>(size - i) : W;
      store_n(out.data + row * out.stride + i,
              add(load_n(x.data + row * x.stride + i, n), load_n(y.data + row * y.stride + i, n)),
              n);
    }
}

// The first of the greatest values; -1 if one of them all is NaN or infinite.
int64_t best_index(const float* x, int64_t size) {
  I largest = set1_int(0);
  F best = set1(-__builtin_inff());
  for (int64_t i = 0; i < size; i += W) {
    // A short tail is filled up with zeros, which a magnitude doesn't see; the best is by value.
    const int n = size - i < W ? static_cast<int>(size - i) : W;
    const F v = load_n(x + i, n);
    largest = max(largest, magnitude_bits(v));
    best = max(best, n < W ? select_range(v, best, 0, n) : v);
  }
  if (max_lane(largest) >= 0x7f800000) return -1;
  const float value = max_lanes(best);
  int64_t i = 0;
  while (x[i] != value) ++i;
  return i;
}

template <class T>
void embed_float(const Weight& weight, int64_t id, float* out) {
  const T* column = reinterpret_cast<const T*>(weight.panels + id / TILE * weight.panel_bytes) +
                    id % TILE;
  for (int64_t k = 0; k < weight.num_inputs; ++k) out[k] = to_f32(column[k * TILE]);
}

// One output's weights, in the same arithmetic as the float kernel for quantised weights.
template <Format FORMAT>
void embed_quantised(const Weight& weight, int64_t id, float* out) {
  using L = Layout<FORMAT>;
  const uint8_t* panel = weight.panels + id / TILE * weight.panel_bytes;
  const int column = static_cast<int>(id % TILE), part = column / W, lane = column % W;
  const auto pick = [&](F x) {
    float values[W];
    store(values, x);
    return values[lane];
  };
  for (int64_t g = 0; g < weight.num_inputs / GROUP; ++g) {
    const GroupReader<FORMAT> reader(panel + g / L::GROUPS * L::UNIT_BYTES,
                                     static_cast<int>(g % L::GROUPS), part);
    float scale[2], minimum = 0.0f;
    if constexpr (FORMAT == Format::Q6_K) {
      for (int half = 0; half < 2; ++half)
        scale[half] = pick(mul(reader.half_at(0), to_float(reader.half_scale(half))));
    } else {
      scale[0] = scale[1] = pick(reader.scale());
    }
    if constexpr (L::MIN) minimum = pick(reader.minimum());
    for_four([&](auto j) {
      constexpr int J = decltype(j)::value;
      B steps[2];
      reader.template steps<J>(steps[0], steps[1]);
      for (int half = 0; half < 2; ++half) {
        uint8_t bytes[4 * W];
        __builtin_memcpy(bytes, &steps[half], sizeof bytes);
        for (int i = 0; i < 4; ++i) {
          float w = (static_cast<float>(bytes[4 * lane + i]) - static_cast<float>(L::ZERO)) *
                    scale[half];
          if constexpr (L::MIN) w += minimum;
          out[g * GROUP + 16 * half + 4 * J + i] = w;
        }
      }
    });
  }
}

void embed(const Weight& weight, const int64_t* ids, const Rows& out, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* to = out.data + row * out.stride;
    switch (weight.format) {
      case Format::F32: embed_float<float>(weight, ids[row], to); break;
      case Format::F16: embed_float<Half>(weight, ids[row], to); break;
      case Format::BF16: embed_float<BFloat>(weight, ids[row], to); break;
      case Format::Q4_0: embed_quantised<Format::Q4_0>(weight, ids[row], to); break;
      case Format::Q4_1: embed_quantised<Format::Q4_1>(weight, ids[row], to); break;
      case Format::Q5_0: embed_quantised<Format::Q5_0>(weight, ids[row], to); break;
      case Format::Q5_1: embed_quantised<Format::Q5_1>(weight, ids[row], to); break;
      case Format::Q8_0: embed_quantised<Format::Q8_0>(weight, ids[row], to); break;
      case Format::Q4_K: embed_quantised<Format::Q4_K>(weight, ids[row], to); break;
      case Format::Q5_K: embed_quantised<Format::Q5_K>(weight, ids[row], to); break;
      case Format::Q6_K: embed_quantised<Format::Q6_K>(weight, ids[row], to); break;
    }
  }
}

}  // namespace
}  // namespace eyas
