// What the machine can do at best, for the benchmarks to hold kernels against.
#pragma once

#include "program.h"

namespace eyas {

struct Peaks {
  double read_bytes_per_s;
  double int8_mac_per_s;   // 4-bit weights times int8 activations, summed in 32 bits
  double float_fma_per_s;  // float32 multiply-adds
};

// Each is the best of `repeats`, with every thread of `context` at work at once. Reading: a pass over
// an array of `size` bytes, which should be more than any cache holds; arithmetic: loops that touch
// registers alone. False in a forked child.
bool measure_peaks(Context& context, int64_t size, int repeats, Peaks& peaks);

}  // namespace eyas
