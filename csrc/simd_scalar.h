// 16 lanes in plain C++: runs anywhere, and is what the others are read against.
#pragma once

#include <cmath>

#include "convert.h"

namespace eyas {
namespace {

constexpr int W = 16;
constexpr int MAX_ROWS_INT8 = 2;
constexpr int MAX_ROWS_FLOAT = 2;

struct F {
  float v[W];
};
struct I {
  int32_t v[W];
};
struct B {
  uint8_t v[4 * W];
};

#define EYAS_LANES(expression)          \
  {                                     \
    decltype(a) r;                      \
    for (int i = 0; i < W; ++i) r.v[i] = (expression); \
    return r;                           \
  }

inline F set1(float x) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = x;
  return r;
}
inline F load_n(const float* p, int n) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = i < n ? p[i] : 0.0f;
  return r;
}
inline F load(const float* p) { return load_n(p, W); }
inline void store_n(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
inline void store(float* p, F x) { store_n(p, x, W); }
inline F add(F a, F b) EYAS_LANES(a.v[i] + b.v[i])
inline F sub(F a, F b) EYAS_LANES(a.v[i] - b.v[i])
inline F mul(F a, F b) EYAS_LANES(a.v[i] * b.v[i])
inline F div(F a, F b) EYAS_LANES(a.v[i] / b.v[i])
inline F max(F a, F b) EYAS_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i])
inline F min(F a, F b) EYAS_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i])
inline F fma(F a, F b, F c) EYAS_LANES(a.v[i] * b.v[i] + c.v[i])  // in two roundings
inline F round_even(F a) EYAS_LANES(std::nearbyintf(a.v[i]))
inline F select_range(F a, F other, int low, int high)
    EYAS_LANES(i >= low && i < high ? a.v[i] : other.v[i])
inline I set1_int(int32_t x) {
  I r;
  for (int i = 0; i < W; ++i) r.v[i] = x;
  return r;
}
inline I add(I a, I b) EYAS_LANES(a.v[i] + b.v[i])
inline I mul(I a, I b) EYAS_LANES(a.v[i] * b.v[i])
inline I max(I a, I b) EYAS_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i])
inline F to_float(I a) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
// As the vector instructions do: a value that no int32 can hold becomes the lowest one.
inline I to_int(F a) {
  I r;
  for (int i = 0; i < W; ++i)
    r.v[i] = a.v[i] > -2147483904.0f && a.v[i] < 2147483648.0f
                 ? static_cast<int32_t>(std::nearbyintf(a.v[i]))
                 : INT32_MIN;
  return r;
}
inline F power_of_two(I n) {
  F r;
  for (int i = 0; i < W; ++i) {
    const uint32_t bits = static_cast<uint32_t>(n.v[i] + 127) << 23;
    __builtin_memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline I magnitude_bits(F a) {
  I r;
  for (int i = 0; i < W; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &a.v[i], 4);
    r.v[i] = static_cast<int32_t>(bits & 0x7fffffffu);
  }
  return r;
}
inline int32_t max_lane(I a) {
  int32_t best = a.v[0];
  for (int i = 1; i < W; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline int32_t sum_lanes(I a) {
  int32_t sum = 0;
  for (int i = 0; i < W; ++i) sum += a.v[i];
  return sum;
}
inline void store_i8(int8_t* p, I x) {
  for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
inline float sum_lanes(F x) {
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  return x.v[0];
}
inline float max_lanes(F x) {
  float best = x.v[0];
  for (int i = 1; i < W; ++i) best = best > x.v[i] ? best : x.v[i];
  return best;
}

inline F load_as(const float* p) { return load(p); }
inline F load_as(const Half* p) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = half_to_float(p[i]);
  return r;
}
inline F load_as(const BFloat* p) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = bfloat_to_float(p[i]);
  return r;
}
template <class T>
inline void store_as(T* p, F x) {
  for (int i = 0; i < W; ++i) from_f32(x.v[i], p[i]);
}
inline F load_u8(const uint8_t* p) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = p[i];
  return r;
}
inline I load_i8(const int8_t* p) {
  I r;
  for (int i = 0; i < W; ++i) r.v[i] = p[i];
  return r;
}

inline B load_bytes(const uint8_t* p) {
  B r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
inline B broadcast4(const int8_t* p) {
  B r;
  for (int i = 0; i < W; ++i) __builtin_memcpy(r.v + 4 * i, p, 4);
  return r;
}
#define EYAS_BYTES(expression)              \
  {                                         \
    B r;                                    \
    for (int i = 0; i < 4 * W; ++i) r.v[i] = static_cast<uint8_t>(expression); \
    return r;                               \
  }
inline B low_nibbles(B a) EYAS_BYTES(a.v[i] & 15)
inline B high_nibbles(B a) EYAS_BYTES(a.v[i] >> 4)
template <int SHIFT, int COUNT>
inline B high_bits(B a) EYAS_BYTES(((a.v[i] >> SHIFT) & ((1 << COUNT) - 1)) << 4)
inline B either(B a, B b) EYAS_BYTES(a.v[i] | b.v[i])
template <int INDEX>
inline F byte_as_float(B a) {
  F r;
  for (int i = 0; i < W; ++i) r.v[i] = a.v[4 * i + INDEX];
  return r;
}
#undef EYAS_LANES
#undef EYAS_BYTES

template <int BITS>
struct Dot {
  static constexpr bool OFFSET = true;
  int32_t sum[W] = {};
  template <int STEP>
  void step(const B& w, const B& x) {
    for (int i = 0; i < W; ++i)
      for (int j = 0; j < 4; ++j) sum[i] += w.v[4 * i + j] * static_cast<int8_t>(x.v[4 * i + j]);
  }
  I done() {
    I r;
    for (int i = 0; i < W; ++i) r.v[i] = sum[i];
    return r;
  }
};

}  // namespace
}  // namespace eyas
