#define EYAS_AVX512
#include "table.inl"

EYAS_TABLE(avx512_table, "avx512")
