// 16 lanes: AVX-512 F, BW, DQ, VL and VNNI. See simd.h for what each function means.
#pragma once

#include <immintrin.h>

#include "convert.h"

namespace eyas {
namespace {

constexpr int W = 16;
constexpr int MAX_ROWS_INT8 = 8;
constexpr int MAX_ROWS_FLOAT = 14;

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct B {
  __m512i v;
};

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F round_even(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// Lanes [low, high) of a; `other` elsewhere.
inline F select_range(F a, F other, int low, int high) {
  const __mmask16 mask = static_cast<__mmask16>(((1u << high) - 1u) & ~((1u << low) - 1u));
  return {_mm512_mask_blend_ps(mask, other.v, a.v)};
}
inline I set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I mul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F power_of_two(I n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
inline I magnitude_bits(F a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t max_lane(I a) { return _mm512_reduce_max_epi32(a.v); }
inline int32_t sum_lanes(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_i8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
inline float sum_lanes(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(F x) { return _mm512_reduce_max_ps(x.v); }

inline F load_as(const float* p) { return load(p); }
inline F load_as(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_as(const BFloat* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline void store_as(float* p, F x) { store(p, x); }
inline void store_as(Half* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_as(BFloat* p, F x) {
  // Round to nearest, ties to even, in integers; NaN keeps its upper bits and becomes quiet.
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
inline F load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline I load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

inline B load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline B broadcast4(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
inline B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Bits [shift, shift + count) of each byte, moved to bits 4 and up.
template <int SHIFT, int COUNT>
inline B high_bits(B a) {
  const __m512i moved =
      SHIFT <= 4 ? _mm512_slli_epi16(a.v, SHIFT <= 4 ? 4 - SHIFT : 0)
                 : _mm512_srli_epi16(a.v, SHIFT > 4 ? SHIFT - 4 : 0);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(((1 << COUNT) - 1) << 4)))};
}
inline B either(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int INDEX>
inline F byte_as_float(B a) {
  return {_mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(a.v, 8 * INDEX), _mm512_set1_epi32(255)))};
}

// VNNI sums four products of u8 and s8 in 32 bits exactly, whatever the weight's bits.
template <int BITS>
struct Dot {
  static constexpr bool OFFSET = true;
  __m512i sum = _mm512_setzero_si512();
  template <int STEP>
  void step(B w, B x) {
    sum = _mm512_dpbusd_epi32(sum, w.v, x.v);
  }
  I done() { return {sum}; }
};

}  // namespace
}  // namespace eyas
