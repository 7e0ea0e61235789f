// float16 and bfloat16 to and from float32, in plain integer arithmetic.
#pragma once

#include "kernels.h"

namespace eyas {
namespace {

inline float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float bfloat_to_float(BFloat x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

inline float half_to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return as_float(sign | ((rest << 13) + 0x38000000u));
  // Subnormal: an integer times 2^-24, which float32 holds exactly.
  return as_float(sign | as_bits(static_cast<float>(rest) * 5.9604644775390625e-8f));
}

// Round to nearest, ties to even; NaN stays NaN.
inline BFloat float_to_bfloat(float x) {
  const uint32_t bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

inline Half float_to_half(float x) {
  const uint32_t bits = as_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu))};
  if (rest >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65536 and above
  if (rest < 0x38800000u) {
    // Below 2^-14: adding 0.5 puts a unit of 2^-24 in the last place, rounded to nearest even.
    const uint32_t rounded = as_bits(as_float(rest) + 0.5f);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

inline float to_f32(float x) { return x; }
inline float to_f32(Half x) { return half_to_float(x); }
inline float to_f32(BFloat x) { return bfloat_to_float(x); }
inline void from_f32(float x, float& out) { out = x; }
inline void from_f32(float x, Half& out) { out = float_to_half(x); }
inline void from_f32(float x, BFloat& out) { out = float_to_bfloat(x); }

}  // namespace
}  // namespace eyas
