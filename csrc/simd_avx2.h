// 8 lanes: AVX2, FMA and F16C. See simd.h for what each function means.
#pragma once

#include <immintrin.h>

#include "convert.h"

namespace eyas {
namespace {

constexpr int W = 8;
constexpr int MAX_ROWS_INT8 = 4;
constexpr int MAX_ROWS_FLOAT = 6;

struct F {
  __m256 v;
};
struct I {
  __m256i v;
};
struct B {
  __m256i v;
};

inline __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }

inline F set1(float x) { return {_mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F load_n(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
inline void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x.v); }
inline F add(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F round_even(F a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F select_range(F a, F other, int low, int high) {
  const __m256i mask = _mm256_andnot_si256(first(low), first(high));
  return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(mask))};
}
inline I set1_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I mul(I a, I b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F power_of_two(I n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.v, _mm256_set1_epi32(127)), 23))};
}
inline I magnitude_bits(F a) {
  return {_mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff))};
}
inline I max(I a, I b) { return {_mm256_max_epi32(a.v, b.v)}; }
inline int32_t max_lane(I a) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t sum_lanes(I a) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline void store_i8(int8_t* p, I x) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline float sum_lanes(F x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(F x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline F load_as(const float* p) { return load(p); }
inline F load_as(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_as(const BFloat* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))};
}
inline void store_as(float* p, F x) { store(p, x); }
inline void store_as(Half* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_as(BFloat* p, F x) {
  float lane[W];
  store(lane, x);
  for (int i = 0; i < W; ++i) p[i] = float_to_bfloat(lane[i]);
}
inline F load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline I load_i8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}

inline B load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline B broadcast4(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
inline B low_nibbles(B a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline B high_nibbles(B a) {
  return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))};
}
template <int SHIFT, int COUNT>
inline B high_bits(B a) {
  const __m256i moved =
      SHIFT <= 4 ? _mm256_slli_epi16(a.v, SHIFT <= 4 ? 4 - SHIFT : 0)
                 : _mm256_srli_epi16(a.v, SHIFT > 4 ? SHIFT - 4 : 0);
  return {_mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(((1 << COUNT) - 1) << 4)))};
}
inline B either(B a, B b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int INDEX>
inline F byte_as_float(B a) {
  return {_mm256_cvtepi32_ps(
      _mm256_and_si256(_mm256_srli_epi32(a.v, 8 * INDEX), _mm256_set1_epi32(255)))};
}

// maddubs sums two products in 16 bits, and saturates. With |x| <= 127 a weight of BITS bits gives at
// most 2 * 127 * (2^BITS - 1) a step: 8 steps of 4 bits (30,480), 4 of 5 bits (31,496) and 2 of 6
// bits (32,004) stay below 2^15, so sums are widened after that many.
template <int BITS>
struct Dot {
  static constexpr bool OFFSET = true;
  static constexpr int STEPS = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
  __m256i wide, narrow;
  template <int STEP>
  void step(B w, B x) {
    const __m256i product = _mm256_maddubs_epi16(w.v, x.v);
    narrow = STEP % STEPS == 0 ? product : _mm256_add_epi16(narrow, product);
    asm("" : "+x"(narrow));  // one running sum: a tree of sums would need more registers
    if (STEP % STEPS == STEPS - 1) {
      const __m256i sum = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
      wide = STEP < STEPS ? sum : _mm256_add_epi32(wide, sum);
    }
  }
  I done() { return {wide}; }
};

// 8 bits: |w| <= 128 against x with w's sign: 2 * 128 * 127 = 32,512 a step.
template <>
struct Dot<8> {
  static constexpr bool OFFSET = false;
  __m256i wide;
  template <int STEP>
  void step(B w, B x) {
    const __m256i s = _mm256_xor_si256(w.v, _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i product = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x.v, s));
    const __m256i sum = _mm256_madd_epi16(product, _mm256_set1_epi16(1));
    wide = STEP == 0 ? sum : _mm256_add_epi32(wide, sum);
    asm("" : "+x"(wide));
  }
  I done() { return {wide}; }
};

}  // namespace
}  // namespace eyas
