// The k greatest of a row.
#pragma once

#include <cstdint>

namespace eyas {

// Ascending indices of the k greatest of `count` values, k <= count; among equals the lower index is
// greater. Values may be infinite, but not NaN.
template <class T>
void top_k(const T* values, int64_t count, int64_t k, int64_t* indices);

}  // namespace eyas
