// One vocabulary of vector operations, in an anonymous namespace of each instruction set's file.
//
//   F  W lanes of float32          I  W lanes of int32         B  4 * W bytes, 4 per lane
//
//   load_n, store_n      the first n lanes; others read as 0 and are not touched
//   max(a, b)            a > b ? a : b, so that a NaN in b stays
//   fma(a, b, c)         a * b + c, in one rounding where the hardware can
//   sum_lanes, max_lanes one number; the sum by halves: lane i + lane i + W / 2, and so on
//   store_i8             lanes as bytes, for values in -127..127
//   magnitude_bits       |x| as an integer: ordered as |x| is, with NaN above infinity
//   Dot<BITS>            sum over a group of 32 of w * x: weights unsigned of BITS bits, x signed;
//                        OFFSET: whether what was added to the weights, to make them unsigned, is
//                        still in the sum
//
// MAX_ROWS_INT8 and MAX_ROWS_FLOAT are how many rows' sums fit in the registers.
#pragma once

#include "kernels.h"

#if defined(EYAS_AVX512)
#include "simd_avx512.h"
#elif defined(EYAS_AVX2)
#include "simd_avx2.h"
#elif defined(EYAS_NEON)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif

namespace eyas {
namespace {

constexpr int PARTS = TILE / W;  // vectors per tile

inline F zero() { return set1(0.0f); }

// e^x to about 2 units in the last place; below -87 it is 0 or close, above 88 it stays finite.
// x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r (the Taylor series to r^7 has an error of
// 2^-26 there). ln 2 is split in two so that n * high is exact.
inline F exp(F x) {
  x = max(set1(-87.0f), min(set1(88.0f), x));
  const F n = round_even(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, power_of_two(to_int(n)));
}

}  // namespace
}  // namespace eyas
