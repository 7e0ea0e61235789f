// A step's attention for one layer group: who sees which keys, and how the work is cut.
#pragma once

#include <vector>

#include "kernels.h"

namespace eyas {

// One request's rows: positions position .. position + num_tokens - 1. The blocks' first one holds
// position first_block * block_size.
struct Span {
  int64_t row;
  int64_t num_tokens;
  int64_t position;
  int64_t first_block;
  std::vector<int32_t> blocks;
};

// A row's spans of keys that were computed apart, to be put together for one query head.
struct MergeItem {
  int64_t row;
  int query_head;
  int num_spans;
  int64_t partial;  // in floats
  int64_t stride;   // in floats
};

class AttentionPlan {
 public:
  // window: a row sees its last `window` positions (0: all). Tasks are cut for `num_threads`,
  // which decides no bit.
  AttentionPlan(const AttentionShape& shape, int block_size, int64_t window,
                std::vector<Span> spans, int num_threads);
  AttentionPlan(const AttentionPlan&) = delete;

  AttentionShape shape;
  int block_size;
  int64_t num_rows = 0;
  std::vector<AttentionRow> rows;
  std::vector<AttentionTask> tasks;
  std::vector<MergeItem> merges;
  int64_t partial_floats = 0;

 private:
  std::vector<Span> spans_;  // rows point into their blocks
};

}  // namespace eyas
