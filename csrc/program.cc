#include "program.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace eyas {

Context::Context(const KernelTable& kernels_, int num_threads)
    : kernels(kernels_), pool(num_threads), scratch(static_cast<size_t>(num_threads)) {}

void Context::reserve_scratch(int64_t bytes) {
  if (bytes <= scratch_bytes_) return;
  for (Bytes& one : scratch) one = allocate(bytes);
  scratch_bytes_ = bytes;
}

Program::Program(std::shared_ptr<Context> context) : context_(std::move(context)) {}
Program::~Program() = default;

int Program::add_buffer(int64_t width) {
  buffers_.push_back({width, false, {}, {}, nullptr});
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_quant_buffer(int64_t width) {
  buffers_.push_back({width, true, {}, {}, nullptr});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::add_node(std::unique_ptr<Node> node) {
  nodes_.push_back(std::move(node));
  seconds_.push_back(0);
  calls_.push_back(0);
}

void Program::reserve(int64_t num_rows) {
  if (num_rows <= capacity_) return;
  // Powers of two: a growing batch does not reallocate at every step.
  int64_t capacity = 1;
  while (capacity < num_rows) capacity *= 2;
  for (Buffer& buffer : buffers_) {
    if (buffer.quant) {
      buffer.data = allocate(capacity * buffer.width);
      buffer.info = allocate(capacity * (buffer.width / GROUP) *
                             static_cast<int64_t>(sizeof(GroupInfo)));
    } else {
      buffer.data = allocate(capacity * buffer.width * 4);
    }
  }
  capacity_ = capacity;
}

bool Program::run(int64_t num_rows, const std::vector<External>& externals,
                  const std::vector<const int64_t*>& ids,
                  const std::vector<const AttentionPlan*>& plans,
                  const std::vector<const KVCache*>& caches) {
  reserve(num_rows);
  for (const External& e : externals) buffers_[static_cast<size_t>(e.buffer)].external = e.data;
  for (const AttentionPlan* plan : plans) {
    context_->reserve_scratch(attention_scratch(plan->shape) * 4);
    if (plan->partial_floats > partial_floats_) {
      partials_ = allocate(plan->partial_floats * 4);
      partial_floats_ = plan->partial_floats;
    }
  }
  Step step{*this,  *context_, num_rows, context_->pool.size(),
            ids,    plans,     caches,   reinterpret_cast<float*>(partials_.get())};
  for (const auto& node : nodes_) node->prepare(step);
  struct Call {
    Program& program;
    Step& step;
  } call{*this, step};
  const auto body = [](void* argument, int thread) {
    auto& [program, s] = *static_cast<Call*>(argument);
    const bool timed = program.profiling_ && thread == 0;
    auto before = timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    const Node* last = nullptr;
    for (size_t i = 0; i < program.nodes_.size(); ++i) {
      const Node& node = *program.nodes_[i];
      if (node.is_empty(s)) continue;
      if (last && !(last->by_rows(s.num_rows, s.num_threads) &&
                    node.by_rows(s.num_rows, s.num_threads)))
        program.context_->pool.barrier();
      node.run(s, thread);
      last = &node;
      if (timed) {
        const auto now = std::chrono::steady_clock::now();
        program.seconds_[i] += std::chrono::duration<double>(now - before).count();
        program.calls_[i] += 1;
        before = now;
      }
    }
  };
  const bool done = context_->pool.run(body, &call);
  for (const External& e : externals) buffers_[static_cast<size_t>(e.buffer)].external = nullptr;
  if (context_->failure) std::rethrow_exception(std::exchange(context_->failure, nullptr));
  return done;
}

std::vector<Program::Cost> Program::profile() const {
  std::map<std::string, Cost> by_kind;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    Cost& cost = by_kind[nodes_[i]->kind];
    cost.kind = nodes_[i]->kind;
    cost.calls += calls_[i];
    cost.seconds += seconds_[i];
  }
  std::vector<Cost> costs;
  for (auto& [kind, cost] : by_kind) costs.push_back(cost);
  return costs;
}

Rows Step::rows(const View& view) const {
  const auto& buffer = program.buffers_[static_cast<size_t>(view.buffer)];
  float* data = buffer.external ? buffer.external : reinterpret_cast<float*>(buffer.data.get());
  return {data + view.offset, buffer.width};
}

QuantRows Step::quant_rows(int index) const {
  if (index < 0) return {};
  const auto& buffer = program.buffers_[static_cast<size_t>(index)];
  return {reinterpret_cast<int8_t*>(buffer.data.get()),
          reinterpret_cast<GroupInfo*>(buffer.info.get()), buffer.width, buffer.width / GROUP};
}

}  // namespace eyas
