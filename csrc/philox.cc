// A block of four words is two numbers: words 0 and 1 for an even id, 2 and 3 for the odd one after.
#include "philox.h"

#include <algorithm>

namespace eyas {
namespace {

int64_t number(const PhiloxBatch& batch, int i, int64_t parity) {
  const uint64_t high = batch.words[2 * parity][i], low = batch.words[2 * parity + 1][i];
  return static_cast<int64_t>(high << 20 | low >> 12);
}

}  // namespace

void random_bits(const KernelTable& kernels, const NoiseStream& stream, const int64_t* ids,
                 int64_t count, int64_t* bits) {
  PhiloxBatch batch{};
  for (int64_t begin = 0; begin < count; begin += PHILOX_BATCH) {
    const int n = static_cast<int>(std::min<int64_t>(PHILOX_BATCH, count - begin));
    for (int i = 0; i < n; ++i) batch.words[0][i] = static_cast<uint32_t>(ids[begin + i] >> 1);
    kernels.philox(stream, batch);
    for (int i = 0; i < n; ++i) bits[begin + i] = number(batch, i, ids[begin + i] & 1);
  }
}

int64_t loud_bits(const KernelTable& kernels, const NoiseStream& stream, int64_t num_ids,
                  uint32_t floor, int64_t* ids, int64_t* bits) {
  PhiloxBatch batch;
  int64_t found = 0;
  for (int64_t begin = 0; begin < num_ids; begin += 2 * PHILOX_BATCH) {
    for (int i = 0; i < PHILOX_BATCH; ++i)
      batch.words[0][i] = static_cast<uint32_t>(begin / 2 + i);
    if (kernels.philox(stream, batch) < floor) continue;
    const int n = static_cast<int>(std::min<int64_t>(2 * PHILOX_BATCH, num_ids - begin));
    for (int i = 0; i < n; ++i) {
      if (batch.words[i % 2 * 2][i / 2] < floor) continue;
      ids[found] = begin + i;
      bits[found++] = number(batch, i / 2, i % 2);
    }
  }
  return found;
}

}  // namespace eyas
