// What the suites share: seeded random numbers, comparisons and failures.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace eyas::test {

constexpr double UNIT_ROUNDOFF = 0x1p-24;  // of float32

// SplitMix64 (Steele et al. 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  // low .. high, both included.
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  int small(int low, int high) { return static_cast<int>(between(low, high)); }
  bool one_in(int n) { return between(1, n) == 1; }
  // -1 .. 1
  float value() { return static_cast<float>(between(-(1 << 24), 1 << 24)) * 0x1p-24f; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (int64_t i = static_cast<int64_t>(values.size()) - 1; i > 0; --i)
      std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(between(0, i))]);
  }

 private:
  uint64_t state_;
};

// A row of values of one magnitude, which differs from row to row.
inline void fill_row(Random& random, float* row, int64_t size) {
  const float magnitude = std::ldexp(1.0f, random.small(-12, 12));
  const bool extreme = random.one_in(5);  // every int8 value becomes 127 or -127
  for (int64_t i = 0; i < size; ++i) {
    const float x = random.value();
    row[i] = magnitude * (extreme ? (x < 0 ? -1.0f : 1.0f) : x);
  }
  if (random.one_in(8))
    for (int64_t i = 0; i < size && i < GROUP; ++i) row[i] = 0.0f;
}

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw std::runtime_error(text);
}

// Bit for bit, but a NaN is any NaN.
inline bool same(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

inline void check_same(const float* a, const float* b, int64_t size, const std::string& what) {
  for (int64_t i = 0; i < size; ++i)
    if (!same(a[i], b[i]))
      fail("%s: value %lld is %.9g, should be %.9g", what.c_str(), static_cast<long long>(i),
           static_cast<double>(a[i]), static_cast<double>(b[i]));
}

inline void check_near(float value, double reference, double bound, const std::string& what) {
  if (!(std::fabs(static_cast<double>(value) - reference) <= bound))
    fail("%s: %.9g, should be %.9g within %.3g", what.c_str(), static_cast<double>(value),
         reference, bound);
}

// What buffers hold before a kernel writes them, and must still hold where it may not.
constexpr float UNTOUCHED = -12345.678f;

// Rows of exactly the given size, on the heap with nothing to spare, so that AddressSanitizer sees
// what is read past them; columns between `width` and the stride stay as they are.
struct Matrix {
  int64_t rows, width, stride;
  std::vector<float> values;
  Matrix(int64_t rows_, int64_t width_, int64_t padding = 0)
      : rows(rows_),
        width(width_),
        stride(width_ + padding),
        values(static_cast<size_t>((rows_ - 1) * stride + width_), UNTOUCHED) {}
  float* row(int64_t i) { return values.data() + i * stride; }
  const float* row(int64_t i) const { return values.data() + i * stride; }
  Rows view() { return {values.data(), stride}; }
  void fill(Random& random) {
    for (int64_t i = 0; i < rows; ++i) fill_row(random, row(i), width);
  }
  void check_padding(const std::string& what) const {
    for (int64_t i = 0; i + 1 < rows; ++i)
      for (int64_t k = width; k < stride; ++k)
        if (!same(row(i)[k], UNTOUCHED)) fail("%s: wrote past its row", what.c_str());
  }
};

struct QuantMatrix {
  int64_t width;
  std::vector<int8_t> data;
  std::vector<GroupInfo> info;
  QuantMatrix(int64_t rows, int64_t width_)
      : width(width_),
        data(static_cast<size_t>(rows * width_)),
        info(static_cast<size_t>(rows * (width_ / GROUP))) {}
  QuantRows view() { return {data.data(), info.data(), width, width / GROUP}; }
  QuantRows view(int64_t row) {
    return {data.data() + row * width, info.data() + row * (width / GROUP), width, width / GROUP};
  }
};

// A run's suites. `effort` scales the number of random cases.
struct Run {
  Random random;
  int effort;
};
void test_linear(const KernelTable& table, Run run);
void test_rowwise(const KernelTable& table, Run run);
void test_attention(const KernelTable& table, Run run);
void test_program(const KernelTable& table, Run run);
void test_pool(Run run);

}  // namespace eyas::test
