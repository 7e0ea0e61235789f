// Philox4x32-10: integers only, so every instruction set gives the same.

namespace eyas {
namespace {

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u;

inline uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

// Salmon et al. 2011. The loops are over counters, which the compiler turns into vectors.
uint32_t philox(const NoiseStream& stream, PhiloxBatch& batch) {
  auto& [w0, w1, w2, w3] = batch.words;
  for (int i = 0; i < PHILOX_BATCH; ++i) {
    w1[i] = stream.position;
    w2[i] = stream.sample;
    w3[i] = stream.domain;
  }
  uint32_t key0 = static_cast<uint32_t>(stream.seed);
  uint32_t key1 = static_cast<uint32_t>(stream.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < PHILOX_BATCH; ++i) {
      const uint32_t a = w0[i], b = w2[i];
      w0[i] = high_product(b, PHILOX_M1) ^ w1[i] ^ key0;
      w2[i] = high_product(a, PHILOX_M0) ^ w3[i] ^ key1;
      w1[i] = b * PHILOX_M1;
      w3[i] = a * PHILOX_M0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  uint32_t greatest = 0;
  for (int i = 0; i < PHILOX_BATCH; ++i) {
    const uint32_t high = w0[i] > w2[i] ? w0[i] : w2[i];
    greatest = greatest > high ? greatest : high;
  }
  return greatest;
}

}  // namespace
}  // namespace eyas
