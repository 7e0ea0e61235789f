#include "quantise_weights.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "convert.h"
#include "pack.h"

namespace eyas {
namespace {

constexpr int LANES = 8;  // running minima and maxima, so that the compiler can use vectors

template <class Pick>
float reduce(const float* x, Pick pick) {
  float lanes[LANES];
  for (int j = 0; j < LANES; ++j) lanes[j] = x[j];
  for (int i = LANES; i < GROUP; i += LANES)
    for (int j = 0; j < LANES; ++j) lanes[j] = pick(lanes[j], x[i + j]);
  for (int j = 1; j < LANES; ++j) lanes[0] = pick(lanes[0], lanes[j]);
  return lanes[0];
}

// 1 / scale; 0 where that is not finite: the scale is then 0 in float16, and so are the values.
float inverse(float scale) {
  const float result = 1.0f / scale;
  return result <= std::numeric_limits<float>::max() ? result : 0.0f;
}

bool store_half(float x, uint8_t* out) {
  const Half half = float_to_half(x);
  __builtin_memcpy(out, &half.bits, 2);
  return (half.bits & 0x7c00u) != 0x7c00u;
}

// Nearest multiple of max|x| / 127, ties away from zero.
bool quantise_q8_0(const float* x, uint8_t* out) {
  float magnitude[GROUP];
  for (int i = 0; i < GROUP; ++i) magnitude[i] = std::fabs(x[i]);
  const float scale = reduce(magnitude, [](float a, float b) { return a < b ? b : a; }) / 127.0f;
  const float factor = inverse(scale);
  for (int i = 0; i < GROUP; ++i) {
    const float size = magnitude[i] * factor;
    const int32_t whole = static_cast<int32_t>(size);
    const int32_t rounded = whole + (size - static_cast<float>(whole) >= 0.5f ? 1 : 0);
    out[2 + i] = static_cast<uint8_t>(x[i] < 0.0f ? -rounded : rounded);
  }
  return store_half(scale, out);
}

// 16 levels from the minimum to the maximum; the first half of the group in the low nibbles.
bool quantise_q4_1(const float* x, uint8_t* out) {
  const float least = reduce(x, [](float a, float b) { return b < a ? b : a; });
  const float most = reduce(x, [](float a, float b) { return a < b ? b : a; });
  const float scale = (most - least) / 15.0f;
  const bool scale_fits = store_half(scale, out);
  if (!(store_half(least, out + 2) && scale_fits)) return false;  // x - least may not be finite
  const float factor = inverse(scale);
  uint8_t levels[GROUP];
  for (int i = 0; i < GROUP; ++i) {
    const int32_t level = static_cast<int32_t>((x[i] - least) * factor + 0.5f);
    levels[i] = static_cast<uint8_t>(level > 15 ? 15 : level);
  }
  for (int i = 0; i < GROUP / 2; ++i)
    out[4 + i] = static_cast<uint8_t>(levels[i] | levels[GROUP / 2 + i] << 4);
  return true;
}

}  // namespace

bool quantise_rows(ThreadPool& pool, Format format, const float* rows, int64_t num_rows,
                   int64_t num_inputs, uint8_t* out, bool& fits) {
  struct Call {
    bool (*quantise)(const float*, uint8_t*);
    const float* x;
    uint8_t* out;
    int64_t num_rows, groups, group_bytes;
    int threads;
    std::atomic<bool> fits;
  } call{format == Format::Q8_0 ? quantise_q8_0 : quantise_q4_1,
         rows,
         out,
         num_rows,
         num_inputs / GROUP,
         row_bytes(format, GROUP),
         pool.size(),
         true};
  const auto body = [](void* argument, int thread) {
    Call& c = *static_cast<Call*>(argument);
    const int64_t end = c.num_rows * (thread + 1) / c.threads * c.groups;
    bool fit = true;
    for (int64_t i = c.num_rows * thread / c.threads * c.groups; i < end; ++i)
      fit &= c.quantise(c.x + i * GROUP, c.out + i * c.group_bytes);
    if (!fit) c.fits = false;
  };
  const bool done = pool.run(body, &call);
  fits = call.fits;
  return done;
}

}  // namespace eyas
