// Float weights to GGUF blocks, the same bits as gguf.quants makes (the reference for the format).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

namespace eyas {

// Quantises [num_rows, num_inputs] finite floats to Q8_0 or Q4_1, each thread a run of rows, into
// `out` (num_rows times row_bytes). `fits` becomes whether float16 can hold all scales and minima.
// False in a forked child, where nothing is done.
bool quantise_rows(ThreadPool& pool, Format format, const float* rows, int64_t num_rows,
                   int64_t num_inputs, uint8_t* out, bool& fits);

}  // namespace eyas
