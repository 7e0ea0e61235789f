// Which tables this build has, and which of them this machine can run.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace eyas {

extern const KernelTable baseline_table;
#if defined(__x86_64__)
extern const KernelTable avx2_table;
extern const KernelTable avx512_table;
#elif defined(__aarch64__)
extern const KernelTable neon_table;
#endif

const KernelTable* const* kernel_tables() {
  static const KernelTable* const tables[] = {
#if defined(__x86_64__)
      &avx512_table, &avx2_table,
#elif defined(__aarch64__)
      &neon_table,
#endif
      &baseline_table, nullptr};
  return tables;
}

namespace {

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports doesn't know it.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

}  // namespace

bool is_supported(const KernelTable& table) {
#if defined(__x86_64__)
  if (&table == &avx512_table)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  if (&table == &avx2_table)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
  if (&table == &neon_table) return getauxval(AT_HWCAP) & dot_products;
#endif
  (void)table;
  return true;
}

}  // namespace eyas
