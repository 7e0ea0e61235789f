// 4 lanes: AArch64 with dotprod. See simd.h for what each function means.
#pragma once

#include <arm_neon.h>

#include "convert.h"

namespace eyas {
namespace {

constexpr int W = 4;
constexpr int MAX_ROWS_INT8 = 4;
constexpr int MAX_ROWS_FLOAT = 6;

struct F {
  float32x4_t v;
};
struct I {
  int32x4_t v;
};
struct B {
  uint8x16_t v;
};

inline int32x4_t lanes() {
  const int32_t indices[W] = {0, 1, 2, 3};
  return vld1q_s32(indices);
}
inline uint32x4_t first(int n) { return vcltq_s32(lanes(), vdupq_n_s32(n)); }

inline F set1(float x) { return {vdupq_n_f32(x)}; }
inline F load(const float* p) { return {vld1q_f32(p)}; }
inline F load_n(const float* p, int n) {
  if (n >= W) return load(p);
  float lane[W] = {};
  for (int i = 0; i < n; ++i) lane[i] = p[i];
  return load(lane);
}
inline void store(float* p, F x) { vst1q_f32(p, x.v); }
inline void store_n(float* p, F x, int n) {
  if (n >= W) return store(p, x);
  float lane[W];
  store(lane, x);
  for (int i = 0; i < n; ++i) p[i] = lane[i];
}
inline F add(F a, F b) { return {vaddq_f32(a.v, b.v)}; }
inline F sub(F a, F b) { return {vsubq_f32(a.v, b.v)}; }
inline F mul(F a, F b) { return {vmulq_f32(a.v, b.v)}; }
inline F div(F a, F b) { return {vdivq_f32(a.v, b.v)}; }
// FMAX and FMIN would take a NaN from either side.
inline F max(F a, F b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline F min(F a, F b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline F round_even(F a) { return {vrndnq_f32(a.v)}; }
inline F select_range(F a, F other, int low, int high) {
  return {vbslq_f32(vbicq_u32(first(high), first(low)), a.v, other.v)};
}
inline I set1_int(int32_t x) { return {vdupq_n_s32(x)}; }
inline I add(I a, I b) { return {vaddq_s32(a.v, b.v)}; }
inline I mul(I a, I b) { return {vmulq_s32(a.v, b.v)}; }
inline F to_float(I a) { return {vcvtq_f32_s32(a.v)}; }
inline I to_int(F a) { return {vcvtnq_s32_f32(a.v)}; }
inline F power_of_two(I n) {
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v, vdupq_n_s32(127)), 23))};
}
inline I magnitude_bits(F a) {
  return {vandq_s32(vreinterpretq_s32_f32(a.v), vdupq_n_s32(0x7fffffff))};
}
inline I max(I a, I b) { return {vmaxq_s32(a.v, b.v)}; }
inline int32_t max_lane(I a) { return vmaxvq_s32(a.v); }
inline int32_t sum_lanes(I a) { return vaddvq_s32(a.v); }
inline void store_i8(int8_t* p, I x) {
  const int16x4_t words = vmovn_s32(x.v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  __builtin_memcpy(p, &four, 4);
}
inline float sum_lanes(F x) {
  const float32x2_t two = vadd_f32(vget_low_f32(x.v), vget_high_f32(x.v));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float max_lanes(F x) { return vmaxvq_f32(x.v); }

inline F load_as(const float* p) { return load(p); }
inline F load_as(const Half* p) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))};
}
inline F load_as(const BFloat* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))};
}
inline void store_as(float* p, F x) { store(p, x); }
inline void store_as(Half* p, F x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x.v)));
}
inline void store_as(BFloat* p, F x) {
  // Round to nearest, ties to even, in integers; NaN keeps its upper bits and becomes quiet.
  const uint32x4_t bits = vreinterpretq_u32_f32(x.v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(x.v, x.v), rounded, quiet), 16));
}
inline uint8x8_t four_bytes(const void* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(word));
}
inline F load_u8(const uint8_t* p) {
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))))};
}
inline I load_i8(const int8_t* p) {
  return {vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))))};
}

inline B load_bytes(const uint8_t* p) { return {vld1q_u8(p)}; }
inline B broadcast4(const int8_t* p) {
  const uint8x8_t bytes = four_bytes(p);
  return {vcombine_u8(bytes, bytes)};
}
inline B low_nibbles(B a) { return {vandq_u8(a.v, vdupq_n_u8(15))}; }
inline B high_nibbles(B a) { return {vshrq_n_u8(a.v, 4)}; }
template <int SHIFT, int COUNT>
inline B high_bits(B a) {
  const uint8x16_t mask = vdupq_n_u8(((1 << COUNT) - 1) << 4);
  if constexpr (SHIFT <= 4)
    return {vandq_u8(vshlq_n_u8(a.v, 4 - SHIFT), mask)};
  else
    return {vandq_u8(vshrq_n_u8(a.v, SHIFT - 4), mask)};
}
inline B either(B a, B b) { return {vorrq_u8(a.v, b.v)}; }
template <int INDEX>
inline F byte_as_float(B a) {
  uint32x4_t words = vreinterpretq_u32_u8(a.v);
  if constexpr (INDEX > 0) words = vshrq_n_u32(words, 8 * INDEX);
  return {vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)))};
}

// SDOT sums four products of signed bytes in 32 bits. Weights of up to 6 bits are the same signed;
// those of 8 bits become so when 128 is taken off them.
template <int BITS>
struct Dot {
  static constexpr bool OFFSET = BITS < 8;
  int32x4_t sum = vdupq_n_s32(0);
  template <int STEP>
  void step(B w, B x) {
    const uint8x16_t weights = OFFSET ? w.v : veorq_u8(w.v, vdupq_n_u8(0x80));
    sum = vdotq_s32(sum, vreinterpretq_s8_u8(weights), vreinterpretq_s8_u8(x.v));
  }
  I done() { return {sum}; }
};

}  // namespace
}  // namespace eyas
