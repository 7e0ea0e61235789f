// How the nodes of a program are cut among threads.
#pragma once

#include "program.h"

namespace eyas {

struct Range {
  int64_t begin, end;
};

// Part `index` of `count` nearly equal parts of 0 .. size - 1.
inline Range part(int64_t size, int index, int count) {
  return {size * index / count, size * (index + 1) / count};
}

class ByRows : public Node {
 public:
  using Node::Node;
  bool by_rows(int64_t, int) const override { return true; }
  void run(const Step& step, int thread) const override {
    const Range range = part(step.num_rows, thread, step.num_threads);
    if (range.begin < range.end) run_rows(step, range);
  }
  virtual void run_rows(const Step& step, Range range) const = 0;
};

class NotByRows : public Node {
 public:
  using Node::Node;
  bool by_rows(int64_t, int) const override { return false; }
};

}  // namespace eyas
