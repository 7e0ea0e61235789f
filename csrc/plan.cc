#include "plan.h"

#include <algorithm>
#include <stdexcept>

namespace eyas {

AttentionPlan::AttentionPlan(const AttentionShape& shape_, int block_size_, int64_t window,
                             std::vector<Span> spans, int num_threads)
    : shape(shape_), block_size(block_size_), spans_(std::move(spans)) {
  const int per_kv = shape.num_query_heads / shape.num_kv_heads;
  for (const Span& span : spans_) num_rows += span.num_tokens;
  // Enough tasks to keep every thread busy, and no longer than their scratch.
  const int64_t fair = num_rows * shape.num_kv_heads / (4 * num_threads);
  const int64_t tokens_per_task =
      std::clamp<int64_t>(fair, 1, std::max(1, MAX_QUERIES / per_kv));
  rows.resize(static_cast<size_t>(num_rows));
  for (const Span& span : spans_) {
    if (span.num_tokens == 0) continue;
    const int64_t last = span.position + span.num_tokens - 1;
    const int64_t blocks = static_cast<int64_t>(span.blocks.size());
    if (span.num_tokens < 0 || span.row < 0 || span.row + span.num_tokens > num_rows ||
        last / block_size >= span.first_block + blocks)
      throw std::invalid_argument("a span's rows or blocks are not there");
    for (int64_t i = 0; i < span.num_tokens; ++i) {
      const int64_t position = span.position + i;
      const int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
      rows[static_cast<size_t>(span.row + i)] = {position, first, span.blocks.data(),
                                                 span.first_block};
    }
    for (int64_t i = 0; i < span.num_tokens; i += tokens_per_task) {
      const int64_t count = std::min(tokens_per_task, span.num_tokens - i);
      const int64_t begin = rows[static_cast<size_t>(span.row + i)].first_visible / KEY_SPAN;
      const int64_t end = (span.position + i + count - 1) / KEY_SPAN + 1;
      for (int head = 0; head < shape.num_kv_heads; ++head)
        tasks.push_back({span.row + i, static_cast<int>(count), head, begin, end, -1});
    }
  }
  if (num_threads == 1 || static_cast<int64_t>(tasks.size()) >= 8 * num_threads) return;
  // Few tasks: cut them at spans of keys.
  std::vector<AttentionTask> whole;
  whole.swap(tasks);
  int64_t total = 0;
  for (const AttentionTask& task : whole) total += task.span_end - task.span_begin;
  const int64_t spans_per_part = std::max<int64_t>(1, total / (8 * num_threads));
  int64_t partials = 0;  // rows of partial results
  const int64_t size = partial_size(shape);
  for (AttentionTask task : whole) {
    const int64_t spans_of_task = task.span_end - task.span_begin;
    if (spans_of_task == 1) {
      tasks.push_back(task);
      continue;
    }
    const int num = task.num_tokens * per_kv;
    for (int r = 0; r < num; ++r)
      merges.push_back({task.row + r / per_kv, task.kv_head * per_kv + r % per_kv,
                        static_cast<int>(spans_of_task), (partials + r) * size, num * size});
    for (int64_t span = task.span_begin; span < task.span_end; span += spans_per_part) {
      AttentionTask part = task;
      part.span_begin = span;
      part.span_end = std::min(span + spans_per_part, task.span_end);
      part.partial = partials + (span - task.span_begin) * num;
      tasks.push_back(part);
    }
    partials += spans_of_task * num;
  }
  partial_floats = partials * size;
}

}  // namespace eyas
