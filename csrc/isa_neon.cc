#define EYAS_NEON
#include "table.inl"

EYAS_TABLE(neon_table, "neon")
