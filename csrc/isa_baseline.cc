#include "table.inl"

EYAS_TABLE(baseline_table, "baseline")
