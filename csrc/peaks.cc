#include "peaks.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace eyas {
namespace {

constexpr int64_t ITERATIONS = 1 << 20;

struct Work {
  Context& context;
  const uint8_t* data;
  int64_t size;
  int64_t done[2] = {};  // multiply-adds of one thread
};

void reset(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  const int64_t size = work.size / work.context.pool.size();
  // Each thread writes its own part first: on its own memory node, where there are several.
  std::memset(const_cast<uint8_t*>(work.data) + thread * size, 1, static_cast<size_t>(size));
}

// Plain C++: a core waits for memory long before its additions matter.
void read(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  const int64_t size = work.size / work.context.pool.size();
  const uint8_t* part = work.data + thread * size;
  uint64_t sums[32] = {};
  for (int64_t at = 0; at < size; at += sizeof sums) {
    uint64_t values[32];
    std::memcpy(values, part + at, sizeof values);
    for (int i = 0; i < 32; ++i) sums[i] += values[i];
  }
  uint64_t sum = 0;
  for (uint64_t one : sums) sum += one;
  volatile uint64_t sink = sum;
  (void)sink;
}

void multiply_int8(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  alignas(ALIGN) uint8_t bytes[ALIGN];
  std::memset(bytes, 1, sizeof bytes);
  float sink;
  const int64_t done = work.context.kernels.int8_peak(bytes, ITERATIONS, &sink);
  if (thread == 0) work.done[0] = done;
}

void multiply_floats(void* argument, int thread) {
  Work& work = *static_cast<Work*>(argument);
  alignas(ALIGN) float values[2 * TILE];
  std::fill_n(values, 2 * TILE, 0.5f);
  float sink;
  const int64_t done = work.context.kernels.float_peak(values, ITERATIONS, &sink);
  if (thread == 0) work.done[1] = done;
}

}  // namespace

bool measure_peaks(Context& context, int64_t size, int repeats, Peaks& peaks) {
  ThreadPool& pool = context.pool;
  size -= size % (256 * pool.size());
  Arena arena;
  Work work{context, arena.take(size), size};
  if (!pool.run(reset, &work)) return false;
  const auto best = [&](void (*function)(void*, int)) {
    double seconds = 1e9;
    for (int i = 0; i < repeats; ++i) {
      const auto started = std::chrono::steady_clock::now();
      pool.run(function, &work);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
      seconds = std::min(seconds, took.count());
    }
    return seconds;
  };
  peaks.read_bytes_per_s = static_cast<double>(size) / best(read);
  const double int8_seconds = best(multiply_int8), float_seconds = best(multiply_floats);
  peaks.int8_mac_per_s = static_cast<double>(work.done[0] * pool.size()) / int8_seconds;
  peaks.float_fma_per_s = static_cast<double>(work.done[1] * pool.size()) / float_seconds;
  return true;
}

}  // namespace eyas
