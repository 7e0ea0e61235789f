// Aligned memory: buffers that grow, and an arena for what stays.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace eyas {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;

// Uninitialised; the kernel commits a page when it is first written. Throws std::bad_alloc.
Bytes allocate(int64_t size, int64_t alignment = ALIGN);

// Memory for weights, in large pages where the system has them, all freed at once.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  uint8_t* take(int64_t size);

 private:
  std::vector<Bytes> chunks_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace eyas
