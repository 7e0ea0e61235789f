#include "pack.h"

#include <cstring>

#include "layout.h"

namespace eyas {
namespace {

// One group of 32 of a stored row: its integers, and its scales as the layout keeps them.
struct StoredGroup {
  uint8_t q[GROUP];
  uint8_t d[2], m[2];  // f16 scale and minimum, of the group or its superblock
  uint8_t scale[2];    // within a superblock
  uint8_t minimum;
};

void unpack_nibbles(const uint8_t* qs, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = qs[i] & 15;
    q[i + 16] = qs[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* qh, uint8_t* q) {
  for (int i = 0; i < GROUP; ++i) q[i] |= static_cast<uint8_t>((qh[i / 8] >> (i % 8) & 1) << 4);
}

// Scale and minimum j of 8, of 6 bits each, in the 12 bytes of a K-quant's superblock.
void unpack_scale_min(const uint8_t* s, int j, StoredGroup& out) {
  if (j < 4) {
    out.scale[0] = s[j] & 63;
    out.minimum = s[j + 4] & 63;
  } else {
    out.scale[0] = static_cast<uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    out.minimum = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// Group `g` of a row, as the formats are defined by GGML.
void read_group(Format format, const uint8_t* row, int64_t g, StoredGroup& out) {
  const auto copy = [](uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 2); };
  switch (format) {
    case Format::Q4_0: {
      const uint8_t* block = row + g * 18;
      copy(out.d, block);
      return unpack_nibbles(block + 2, out.q);
    }
    case Format::Q4_1: {
      const uint8_t* block = row + g * 20;
      copy(out.d, block);
      copy(out.m, block + 2);
      return unpack_nibbles(block + 4, out.q);
    }
    case Format::Q5_0: {
      const uint8_t* block = row + g * 22;
      copy(out.d, block);
      unpack_nibbles(block + 6, out.q);
      return add_fifth_bits(block + 2, out.q);
    }
    case Format::Q5_1: {
      const uint8_t* block = row + g * 24;
      copy(out.d, block);
      copy(out.m, block + 2);
      unpack_nibbles(block + 8, out.q);
      return add_fifth_bits(block + 4, out.q);
    }
    case Format::Q8_0: {
      const uint8_t* block = row + g * 34;
      copy(out.d, block);
      for (int i = 0; i < GROUP; ++i) out.q[i] = block[2 + i] ^ 0x80;
      return;
    }
    case Format::Q4_K:
    case Format::Q5_K: {
      const bool five = format == Format::Q5_K;
      const uint8_t* block = row + g / 8 * (five ? 176 : 144);
      const int j = static_cast<int>(g % 8);
      copy(out.d, block);
      copy(out.m, block + 2);
      unpack_scale_min(block + 4, j, out);
      const uint8_t* qs = block + (five ? 48 : 16) + j / 2 * 32;
      for (int i = 0; i < GROUP; ++i) {
        out.q[i] = j % 2 ? qs[i] >> 4 : qs[i] & 15;
        if (five) out.q[i] |= static_cast<uint8_t>((block[16 + i] >> j & 1) << 4);
      }
      return;
    }
    case Format::Q6_K: {
      const uint8_t* block = row + g / 8 * 210;
      const int j = static_cast<int>(g % 8), half = j / 4, quarter = j % 4;
      const uint8_t* low = block + 64 * half + 32 * (quarter % 2);
      const uint8_t* high = block + 128 + 32 * half;
      for (int i = 0; i < GROUP; ++i)
        out.q[i] = static_cast<uint8_t>((quarter < 2 ? low[i] & 15 : low[i] >> 4) |
                                        (high[i] >> (2 * quarter) & 3) << 4);
      std::memcpy(out.scale, block + 192 + 2 * j, 2);
      copy(out.d, block + 208);
      return;
    }
    default: return;
  }
}

bool is_finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

template <Format FORMAT>
bool pack_quantised(int64_t num_inputs, const uint8_t* const* rows, int num_rows, uint8_t* panel) {
  using L = Layout<FORMAT>;
  std::memset(panel, 0, static_cast<size_t>(L::panel_bytes(num_inputs)));
  StoredGroup group{};
  bool finite = true;
  for (int column = 0; column < num_rows; ++column) {
    for (int64_t g = 0; g < num_inputs / GROUP; ++g) {
      read_group(FORMAT, rows[column], g, group);
      finite = finite && is_finite_half(group.d) && is_finite_half(group.m);
      uint8_t* unit = panel + g / L::GROUPS * L::UNIT_BYTES;
      const int in_unit = static_cast<int>(g % L::GROUPS);
      if constexpr (is_superblock(FORMAT)) {
        std::memcpy(unit + 2 * column, group.d, 2);
        if constexpr (FORMAT == Format::Q6_K) {
          unit[64 + (2 * in_unit) * TILE + column] = group.scale[0];
          unit[64 + (2 * in_unit + 1) * TILE + column] = group.scale[1];
        } else {
          std::memcpy(unit + 2 * (TILE + column), group.m, 2);
          unit[64 + in_unit * TILE + column] = group.scale[0];
          unit[192 + in_unit * TILE + column] = group.minimum;
        }
      } else {
        std::memcpy(unit + 2 * (in_unit * TILE + column), group.d, 2);
        if constexpr (L::MIN)
          std::memcpy(unit + 2 * ((L::GROUPS + in_unit) * TILE + column), group.m, 2);
      }
      uint8_t* lines = unit + L::HEADER + in_unit * L::GROUP_BYTES;
      for (int k = 0; k < GROUP; ++k) {
        const int step = k / 4, at = 4 * column + k % 4, q = group.q[k];
        if constexpr (L::BITS == 8) {
          lines[LINE * step + at] = static_cast<uint8_t>(q);
        } else {
          lines[LINE * (step % 4) + at] |= static_cast<uint8_t>((q & 15) << (step < 4 ? 0 : 4));
          if constexpr (L::BITS == 5)
            lines[LINE * 4 + at] |= static_cast<uint8_t>((q >> 4) << step);
          else if constexpr (L::BITS == 6)
            lines[LINE * (4 + step / 4) + at] |= static_cast<uint8_t>((q >> 4) << 2 * (step % 4));
        }
      }
    }
  }
  return finite;
}

// T is the values' bits; all ones in `exponent` are infinity or NaN.
template <class T>
bool pack_floats(T exponent, int64_t num_inputs, const uint8_t* const* rows, int num_rows,
                 uint8_t* panel) {
  std::memset(panel, 0, static_cast<size_t>(num_inputs) * TILE * sizeof(T));
  bool finite = true;
  for (int column = 0; column < num_rows; ++column)
    for (int64_t k = 0; k < num_inputs; ++k) {
      T bits;
      std::memcpy(&bits, rows[column] + static_cast<size_t>(k) * sizeof(T), sizeof(T));
      finite = finite && (bits & exponent) != exponent;
      std::memcpy(panel + static_cast<size_t>(k * TILE + column) * sizeof(T), &bits, sizeof(T));
    }
  return finite;
}

struct Name {
  const char* name;
  Format format;
  int inputs, bytes;  // of a block
};
constexpr Name NAMES[] = {
    {"f32", Format::F32, 1, 4},       {"f16", Format::F16, 1, 2},
    {"bf16", Format::BF16, 1, 2},     {"q4_0", Format::Q4_0, 32, 18},
    {"q4_1", Format::Q4_1, 32, 20},   {"q5_0", Format::Q5_0, 32, 22},
    {"q5_1", Format::Q5_1, 32, 24},   {"q8_0", Format::Q8_0, 32, 34},
    {"q4_k", Format::Q4_K, 256, 144}, {"q5_k", Format::Q5_K, 256, 176},
    {"q6_k", Format::Q6_K, 256, 210},
};

const Name& entry(Format format) { return NAMES[static_cast<int>(format)]; }

}  // namespace

std::optional<Format> format_from_name(const std::string& name) {
  for (const Name& n : NAMES)
    if (name == n.name) return n.format;
  return std::nullopt;
}

int64_t row_bytes(Format format, int64_t num_inputs) {
  return num_inputs / entry(format).inputs * entry(format).bytes;
}

int block_inputs(Format format) { return entry(format).inputs; }

int64_t panel_bytes(Format format, int64_t num_inputs) {
  switch (format) {
    case Format::Q4_0: return Layout<Format::Q4_0>::panel_bytes(num_inputs);
    case Format::Q4_1: return Layout<Format::Q4_1>::panel_bytes(num_inputs);
    case Format::Q5_0: return Layout<Format::Q5_0>::panel_bytes(num_inputs);
    case Format::Q5_1: return Layout<Format::Q5_1>::panel_bytes(num_inputs);
    case Format::Q8_0: return Layout<Format::Q8_0>::panel_bytes(num_inputs);
    case Format::Q4_K: return Layout<Format::Q4_K>::panel_bytes(num_inputs);
    case Format::Q5_K: return Layout<Format::Q5_K>::panel_bytes(num_inputs);
    case Format::Q6_K: return Layout<Format::Q6_K>::panel_bytes(num_inputs);
    default: return num_inputs * TILE * entry(format).bytes;
  }
}

bool pack_panel(Format format, int64_t num_inputs, const uint8_t* const* rows, int num_rows,
                uint8_t* panel) {
  switch (format) {
    case Format::Q4_0: return pack_quantised<Format::Q4_0>(num_inputs, rows, num_rows, panel);
    case Format::Q4_1: return pack_quantised<Format::Q4_1>(num_inputs, rows, num_rows, panel);
    case Format::Q5_0: return pack_quantised<Format::Q5_0>(num_inputs, rows, num_rows, panel);
    case Format::Q5_1: return pack_quantised<Format::Q5_1>(num_inputs, rows, num_rows, panel);
    case Format::Q8_0: return pack_quantised<Format::Q8_0>(num_inputs, rows, num_rows, panel);
    case Format::Q4_K: return pack_quantised<Format::Q4_K>(num_inputs, rows, num_rows, panel);
    case Format::Q5_K: return pack_quantised<Format::Q5_K>(num_inputs, rows, num_rows, panel);
    case Format::Q6_K: return pack_quantised<Format::Q6_K>(num_inputs, rows, num_rows, panel);
    case Format::F32: return pack_floats<uint32_t>(0x7f800000u, num_inputs, rows, num_rows, panel);
    case Format::F16: return pack_floats<uint16_t>(0x7c00u, num_inputs, rows, num_rows, panel);
    case Format::BF16: return pack_floats<uint16_t>(0x7f80u, num_inputs, rows, num_rows, panel);
  }
  return false;
}

}  // namespace eyas
