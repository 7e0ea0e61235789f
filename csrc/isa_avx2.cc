#define EYAS_AVX2
#include "table.inl"

EYAS_TABLE(avx2_table, "avx2")
