// Random numbers of 52 bits per token id, as eyas/sampling/noise.py defines them.
#pragma once

#include "kernels.h"

namespace eyas {

// The number of each id.
void random_bits(const KernelTable& kernels, const NoiseStream& stream, const int64_t* ids,
                 int64_t count, int64_t* bits);

// Of the ids 0 .. num_ids - 1, those whose number's leading 32 bits are `floor` or more, ascending,
// and their numbers; there is room for all. Returns how many.
int64_t loud_bits(const KernelTable& kernels, const NoiseStream& stream, int64_t num_ids,
                  uint32_t floor, int64_t* ids, int64_t* bits);

}  // namespace eyas
