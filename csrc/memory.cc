#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace eyas {

Bytes allocate(int64_t size, int64_t alignment) {
  const int64_t rounded = (size + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded));
  if (!p && rounded) throw std::bad_alloc();
  return Bytes(static_cast<uint8_t*>(p));
}

uint8_t* Arena::take(int64_t size) {
  constexpr int64_t page = 2 << 20, chunk = 16 << 20;
  size = (size + ALIGN - 1) / ALIGN * ALIGN;
  if (size > left_) {
    left_ = size > chunk ? size : chunk;
    chunks_.push_back(allocate(left_, page));
    next_ = chunks_.back().get();
#if defined(__linux__)
    madvise(next_, static_cast<size_t>((left_ + page - 1) / page * page), MADV_HUGEPAGE);
#endif
  }
  uint8_t* result = next_;
  next_ += size;
  left_ -= size;
  return result;
}

}  // namespace eyas
