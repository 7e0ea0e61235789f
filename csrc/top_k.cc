#include "top_k.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace eyas {
namespace {

constexpr int64_t LEAST_COLUMNS = 512;  // fewer are not much cheaper, and leave more values over
constexpr int64_t CHUNK = 32;

template <class T>
T kth_greatest(std::vector<T>& values, int64_t k) {
  const auto place = values.begin() + (k - 1);
  std::nth_element(values.begin(), place, values.end(), std::greater<T>());
  return *place;
}

// A lower bound of the k-th greatest: that of the maxima of 2k or more columns, as k of them, so k of
// the values, are no less. Few values are above it.
template <class T>
T lower_bound(const T* values, int64_t count, int64_t k) {
  const int64_t width = std::max(2 * k, LEAST_COLUMNS), height = count / width;
  if (height < 2) return -std::numeric_limits<T>::infinity();
  std::vector<T> maxima(values, values + width);
  for (int64_t row = 1; row < height; ++row) {
    const T* x = values + row * width;
    for (int64_t i = 0; i < width; ++i) maxima[i] = maxima[i] > x[i] ? maxima[i] : x[i];
  }
  return kth_greatest(maxima, k);
}

// In lanes, for the compiler to make vectors of.
template <class T>
T chunk_max(const T* x) {
  constexpr int64_t LANES = 8;
  T lanes[LANES];
  for (int64_t j = 0; j < LANES; ++j) lanes[j] = x[j];
  for (int64_t i = LANES; i < CHUNK; i += LANES)
    for (int64_t j = 0; j < LANES; ++j) lanes[j] = lanes[j] > x[i + j] ? lanes[j] : x[i + j];
  T greatest = lanes[0];
  for (int64_t j = 1; j < LANES; ++j) greatest = greatest > lanes[j] ? greatest : lanes[j];
  return greatest;
}

}  // namespace

template <class T>
void top_k(const T* values, int64_t count, int64_t k, int64_t* indices) {
  if (k == 0) return;
  const T bound = lower_bound(values, count, k);
  std::vector<int64_t> likely;
  std::vector<T> likely_values;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int64_t size = std::min(CHUNK, count - begin);
    if (size == CHUNK && chunk_max(values + begin) < bound) continue;
    int64_t found[CHUNK], num_found = 0;
    for (int64_t i = begin; i < begin + size; ++i) {
      found[num_found] = i;
      num_found += values[i] >= bound;
    }
    for (int64_t j = 0; j < num_found; ++j) {
      likely.push_back(found[j]);
      likely_values.push_back(values[found[j]]);
    }
  }
  const T least = kth_greatest(likely_values, k);
  int64_t equal = k;  // how many of those that equal `least` are among the k
  for (const T value : likely_values) equal -= value > least;
  for (const int64_t i : likely)
    if (values[i] > least || (values[i] == least && equal-- > 0)) *indices++ = i;
}

template void top_k(const float*, int64_t, int64_t, int64_t*);
template void top_k(const double*, int64_t, int64_t, int64_t*);

}  // namespace eyas
