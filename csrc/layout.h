// How a panel holds TILE columns of a weight: sizes and offsets, shared by packing and kernels.
//
// Floats: for k = 0 .. K - 1, TILE values of input k, one per column.
//
// Quantised: groups of 32 inputs. A byte vector holds 4 consecutive inputs of each column; step j
// is inputs 4 j .. 4 j + 3 of the group. Eight steps are eight lines of 64 bytes (8-bit weights), or
// four lines whose low nibbles are steps 0..3 and whose high nibbles are steps 4..7, and for bits
// beyond the fourth more lines: bit j of line 0 belongs to step j (5 bits); bits 2 j, 2 j + 1 of
// line 0 to step j, of line 1 to step 4 + j (6 bits). Groups share a unit with a header of scales,
// so that every line is aligned:
//
//   Q4_0 Q5_0 Q8_0   2 groups   [2][16] f16 scale d
//   Q4_1 Q5_1        2 groups   [2][16] f16 d, [2][16] f16 minimum m
//   Q4_K Q5_K        8 groups   [16] f16 d, [16] f16 dmin, [8][16] u8 scale, [8][16] u8 minimum
//   Q6_K             8 groups   [16] f16 d, 32 bytes unused, [8][2][16] s8 scale (of half a group)
#pragma once

#include "kernels.h"

namespace eyas {
namespace {

constexpr int LINE = 64;

// The value of a weight is scale * (q - ZERO) - or + minimum, as in the format's definition.
template <Format F>
struct Layout;

template <int BITS_, int ZERO_, bool MIN_, int GROUPS_, int HEADER_>
struct LayoutOf {
  static constexpr int BITS = BITS_;
  static constexpr int ZERO = ZERO_;
  static constexpr bool MIN = MIN_;
  static constexpr int GROUPS = GROUPS_;  // per unit
  static constexpr int HEADER = HEADER_;
  static constexpr int LOW_LINES = BITS == 8 ? 8 : 4;
  static constexpr int HIGH_LINES = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;
  static constexpr int GROUP_BYTES = LINE * (LOW_LINES + HIGH_LINES);
  static constexpr int UNIT_BYTES = HEADER + GROUPS * GROUP_BYTES;
  static constexpr int64_t panel_bytes(int64_t num_inputs) {
    const int64_t groups = num_inputs / GROUP;
    return (groups + GROUPS - 1) / GROUPS * UNIT_BYTES;
  }
};

template <>
struct Layout<Format::Q4_0> : LayoutOf<4, 8, false, 2, 64> {};
template <>
struct Layout<Format::Q4_1> : LayoutOf<4, 0, true, 2, 128> {};
template <>
struct Layout<Format::Q5_0> : LayoutOf<5, 16, false, 2, 64> {};
template <>
struct Layout<Format::Q5_1> : LayoutOf<5, 0, true, 2, 128> {};
template <>
struct Layout<Format::Q8_0> : LayoutOf<8, 128, false, 2, 64> {};
template <>
struct Layout<Format::Q4_K> : LayoutOf<4, 0, true, 8, 320> {};
template <>
struct Layout<Format::Q5_K> : LayoutOf<5, 0, true, 8, 320> {};
template <>
struct Layout<Format::Q6_K> : LayoutOf<6, 32, false, 8, 320> {};

constexpr bool is_superblock(Format f) {
  return f == Format::Q4_K || f == Format::Q5_K || f == Format::Q6_K;
}

}  // namespace
}  // namespace eyas
