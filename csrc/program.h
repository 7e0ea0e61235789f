// A recorded forward: kernel calls over fixed buffers, replayed in one call per step.
//
// Buffers have a width; how many rows they hold is decided by each replay. Threads run every node
// together, each its part, and meet at a barrier between nodes, except between two that cut their
// work at the same rows.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "plan.h"
#include "thread_pool.h"

namespace eyas {

// The kernels of one instruction set, and the threads that run them.
class Context {
 public:
  Context(const KernelTable& kernels, int num_threads);
  Context(const Context&) = delete;
  const KernelTable& kernels;
  ThreadPool pool;
  std::vector<Bytes> scratch;  // per thread
  void reserve_scratch(int64_t bytes);
  // What a node threw while the threads were running: for whoever runs the program.
  std::exception_ptr failure;

 private:
  int64_t scratch_bytes_ = 0;
};

struct PackedWeight {
  Weight weight;
  std::shared_ptr<Arena> arena;
  std::vector<float> bias;
};

struct KVCache {
  std::vector<KVLayer> layers;
};

// Columns [offset, offset + width) of a buffer.
struct View {
  int buffer = -1;
  int64_t offset = 0;
  int64_t width = 0;
};

struct Step;

class Node {
 public:
  explicit Node(const char* kind_) : kind(kind_) {}
  virtual ~Node() = default;
  // Called before the threads start, for what a replay has to size.
  virtual void prepare(const Step&) {}
  // Thread `thread`'s part.
  virtual void run(const Step& step, int thread) const = 0;
  virtual bool by_rows(int64_t num_rows, int num_threads) const = 0;
  virtual bool is_empty(const Step&) const { return false; }
  const char* kind;
};

class Program {
 public:
  explicit Program(std::shared_ptr<Context> context);
  Program(const Program&) = delete;
  ~Program();

  int add_buffer(int64_t width);        // float32
  int add_quant_buffer(int64_t width);  // int8 with group infos
  void add_node(std::unique_ptr<Node> node);
  int64_t width(int buffer) const { return buffers_.at(static_cast<size_t>(buffer)).width; }

  struct External {
    int buffer;
    float* data;
  };
  // Runs every node for `num_rows` rows. False in a forked child, whose threads are the parent's.
  bool run(int64_t num_rows, const std::vector<External>& externals,
           const std::vector<const int64_t*>& ids, const std::vector<const AttentionPlan*>& plans,
           const std::vector<const KVCache*>& caches);

  struct Cost {
    std::string kind;
    int64_t calls;
    double seconds;
  };
  void set_profiling(bool on) { profiling_ = on; }
  std::vector<Cost> profile() const;  // since the beginning; barriers included

 private:
  friend struct Step;
  struct Buffer {
    int64_t width;
    bool quant;
    Bytes data, info;
    float* external = nullptr;
  };
  void reserve(int64_t num_rows);

  std::shared_ptr<Context> context_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<double> seconds_;
  std::vector<int64_t> calls_;
  Bytes partials_;
  int64_t partial_floats_ = 0;
  int64_t capacity_ = 0;
  bool profiling_ = false;
};

// What a node sees of a replay.
struct Step {
  const Program& program;
  Context& context;
  int64_t num_rows;
  int num_threads;
  const std::vector<const int64_t*>& ids;
  const std::vector<const AttentionPlan*>& plans;
  const std::vector<const KVCache*>& caches;
  float* partials;

  Rows rows(const View& view) const;
  QuantRows quant_rows(int buffer) const;  // data null for -1
};

}  // namespace eyas
