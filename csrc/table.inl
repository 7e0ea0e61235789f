// Everything, for the instruction set that the including file has named.
#include <cstring>
#include <utility>

#include "kernels.h"
#include "layout.h"
#include "simd.h"
//
#include "linear.inl"
#include "philox.inl"
#include "rowwise.inl"
//
#include "attention.inl"
#include "peaks.inl"

#define EYAS_TABLE(variable, text)                                                          \
  namespace eyas {                                                                          \
  extern const KernelTable variable;                                                        \
  const KernelTable variable = {text,     linear, rms_norm, rope,      silu_mul, quantise,  \
                                add_rows, embed,  write_kv, attention, merge,    philox,    \
                                best_index, int8_peak, float_peak};                                     \
  }
