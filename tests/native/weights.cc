#include "weights.h"

namespace eyas::test {
namespace {

constexpr const char* NAMES[] = {"f32",  "f16",  "bf16", "q4_0", "q4_1", "q5_0",
                                 "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"};

uint16_t read16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
double half_at(const uint8_t* p) { return half_value(read16(p)); }

// Where a block's float16 scales are; -1: there is no second one.
std::pair<int, int> scale_offsets(Format format) {
  switch (format) {
    case Format::Q4_1:
    case Format::Q5_1:
    case Format::Q4_K:
    case Format::Q5_K: return {0, 2};
    case Format::Q6_K: return {208, -1};
    default: return {0, -1};
  }
}

void small_block(Format format, const uint8_t* b, double* values, double* magnitudes) {
  const bool five = format == Format::Q5_0 || format == Format::Q5_1;
  const bool has_min = format == Format::Q4_1 || format == Format::Q5_1;
  const double d = half_at(b), m = has_min ? half_at(b + 2) : 0.0;
  const uint8_t* high = b + (has_min ? 4 : 2);
  const uint8_t* low = high + (five ? 4 : 0);
  for (int i = 0; i < 32; ++i) {
    int q;
    if (format == Format::Q8_0) {
      q = static_cast<int8_t>(b[2 + i]);
    } else {
      q = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
      if (five) q |= (high[i / 8] >> (i % 8) & 1) << 4;
      if (!has_min) q -= five ? 16 : 8;
    }
    values[i] = d * q + m;
    magnitudes[i] = std::fabs(d * q) + std::fabs(m);
  }
}

void k_block(bool five, const uint8_t* b, double* values, double* magnitudes) {
  const double d = half_at(b), dmin = half_at(b + 2);
  const uint8_t* s = b + 4;
  const uint8_t* qs = b + (five ? 48 : 16);
  for (int k = 0; k < 256; ++k) {
    const int group = k / 32, l = k % 32;
    int scale, minimum;
    if (group < 4) {
      scale = s[group] & 63;
      minimum = s[group + 4] & 63;
    } else {
      scale = (s[group + 4] & 15) | (s[group - 4] >> 6) << 4;
      minimum = s[group + 4] >> 4 | (s[group] >> 6) << 4;
    }
    const uint8_t byte = qs[group / 2 * 32 + l];
    int q = group % 2 ? byte >> 4 : byte & 15;
    if (five) q += (b[16 + l] >> group & 1) * 16;
    values[k] = d * scale * q - dmin * minimum;
    magnitudes[k] = std::fabs(d * scale * q) + std::fabs(dmin * minimum);
  }
}

void q6_block(const uint8_t* b, double* values, double* magnitudes) {
  const double d = half_at(b + 208);
  for (int k = 0; k < 256; ++k) {
    const int half = k / 128, quarter = k % 128 / 32, l = k % 32;
    const uint8_t low = b[64 * half + 32 * (quarter & 1) + l];
    const uint8_t high = b[128 + 32 * half + l];
    const int q = ((quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4) - 32;
    values[k] = d * static_cast<int8_t>(b[192 + k / 16]) * q;
    magnitudes[k] = std::fabs(values[k]);
  }
}

// Any bits, but finite scales; for float32 and bfloat16 magnitudes whose products stay finite.
void random_row(Random& random, Format format, int64_t num_inputs, uint8_t* row) {
  const int64_t blocks = num_inputs / block_inputs(format);
  const int64_t size = row_bytes(format, block_inputs(format));
  if (!is_quantised(format)) {
    for (int64_t k = 0; k < num_inputs; ++k) {
      const float x = std::ldexp(random.value(), random.small(-20, 20));
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (format == Format::F16) bits = random_half(random);
      if (format == Format::BF16) bits >>= 16;
      for (int64_t i = 0; i < size; ++i) row[k * size + i] = static_cast<uint8_t>(bits >> 8 * i);
    }
    return;
  }
  const auto [first, second] = scale_offsets(format);
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* b = row + block * size;
    const bool extreme = random.one_in(4);
    const auto same = static_cast<uint8_t>(random.pick({0, 0xff, 0x80, 0x7f}));
    for (int64_t i = 0; i < size; ++i) b[i] = extreme ? same : static_cast<uint8_t>(random.bits());
    for (const int at : {first, second}) {
      if (at < 0) continue;
      const uint16_t scale = random_half(random);
      b[at] = static_cast<uint8_t>(scale);
      b[at + 1] = static_cast<uint8_t>(scale >> 8);
    }
  }
}

}  // namespace

const char* name_of(Format format) { return NAMES[static_cast<int>(format)]; }

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

double bfloat_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

uint16_t random_half(Random& random) {
  for (;;) {
    const auto bits = static_cast<uint16_t>(random.bits());
    if ((bits & 0x7c00) != 0x7c00) return bits;
  }
}

void dequantise(Format format, const uint8_t* row, int64_t num_inputs, double* values,
                double* magnitudes) {
  const int64_t inputs = block_inputs(format), size = row_bytes(format, inputs);
  for (int64_t k = 0; k < num_inputs; k += inputs, row += size, values += inputs,
               magnitudes += inputs) {
    switch (format) {
      case Format::F32: {
        float x;
        std::memcpy(&x, row, 4);
        values[0] = x;
        break;
      }
      case Format::F16: values[0] = half_at(row); break;
      case Format::BF16: values[0] = bfloat_value(read16(row)); break;
      case Format::Q4_K: k_block(false, row, values, magnitudes); continue;
      case Format::Q5_K: k_block(true, row, values, magnitudes); continue;
      case Format::Q6_K: q6_block(row, values, magnitudes); continue;
      default: small_block(format, row, values, magnitudes); continue;
    }
    magnitudes[0] = std::fabs(values[0]);
  }
}

TestWeight::TestWeight(Random& random, Format format, int64_t num_outputs, int64_t num_inputs,
                       bool with_bias)
    : values(static_cast<size_t>(num_outputs * num_inputs)),
      magnitudes(static_cast<size_t>(num_outputs * num_inputs)) {
  weight.format = format;
  weight.num_outputs = num_outputs;
  weight.num_inputs = num_inputs;
  weight.panel_bytes = panel_bytes(format, num_inputs);
  panels.resize(static_cast<size_t>(weight.panel_bytes * weight.num_tiles()), 0xff);
  weight.panels = panels.data();
  const int64_t bytes = row_bytes(format, num_inputs);
  for (int64_t tile = 0; tile < weight.num_tiles(); ++tile) {
    std::vector<std::vector<uint8_t>> stored;
    std::vector<const uint8_t*> rows;
    for (int64_t n = tile * TILE; n < num_outputs && n < (tile + 1) * TILE; ++n) {
      stored.emplace_back(static_cast<size_t>(bytes));
      random_row(random, format, num_inputs, stored.back().data());
      rows.push_back(stored.back().data());
      dequantise(format, rows.back(), num_inputs, values.data() + n * num_inputs,
                 magnitudes.data() + n * num_inputs);
    }
    uint8_t* panel = panels.data() + tile * weight.panel_bytes;
    if (!pack_panel(format, num_inputs, rows.data(), static_cast<int>(rows.size()), panel))
      fail("%s: finite rows are not", name_of(format));
  }
  if (!with_bias) return;
  bias.resize(static_cast<size_t>(weight.num_tiles() * TILE));
  for (float& b : bias) b = random.value();
  weight.bias = bias.data();
}

}  // namespace eyas::test
