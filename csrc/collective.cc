#include "collective.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "node_parts.h"

namespace eyas {
namespace {

constexpr std::chrono::microseconds YIELDING{200};
constexpr int64_t HEADER_BYTES = 4096;
constexpr int64_t CHUNK_FLOATS = 1 << 16;  // moved at once: stays in the second-level cache

// Parks until somebody wakes those who wait for `value`, if it still is `old`.
void park(std::atomic<uint32_t>& value, uint32_t old) {
#if defined(__linux__)
  // Not FUTEX_PRIVATE: other processes wake.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, old, nullptr, nullptr, 0);
#else
  if (value.load(std::memory_order_acquire) == old)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
          0);
#else
  (void)value;
#endif
}

// Calls function(row, first column, end column) for this thread's part of rows x columns.
template <class Function>
void for_part(int64_t num_rows, int64_t width, int thread, int num_threads, Function function) {
  const Range range = part(num_rows * width, thread, num_threads);
  for (int64_t at = range.begin; at < range.end;) {
    const int64_t row = at / width, first = at % width;
    const int64_t end = std::min(width, first + range.end - at);
    function(row, first, end);
    at += end - first;
  }
}

class Gather : public NotByRows {
 public:
  Gather(std::shared_ptr<Group> group, View x, View out, std::vector<int64_t> widths, bool sum)
      : NotByRows(sum ? "all_reduce" : "all_gather"),
        group_(std::move(group)),
        x_(x),
        out_(out),
        widths_(std::move(widths)),
        widest_(*std::max_element(widths_.begin(), widths_.end())),
        sum_(sum) {
    if (widest_ > Group::SLOT_FLOATS)
      throw std::invalid_argument("rows of " + std::to_string(widest_) +
                                  " values are too long to exchange");
  }

  void run(const Step& step, int thread) const override {
    const int64_t chunk = std::max<int64_t>(1, CHUNK_FLOATS / widest_);
    const Rows x = step.rows(x_);
    for (int64_t first = 0; first < step.num_rows; first += chunk) {
      const int64_t num_rows = std::min(chunk, step.num_rows - first);
      float* slots = group_->slots();
      float* own = slots + group_->rank * Group::SLOT_FLOATS;
      for_part(num_rows, x_.width, thread, step.num_threads,
               [&](int64_t row, int64_t begin, int64_t end) {
                 std::memcpy(own + row * x_.width + begin,
                             x.data + (first + row) * x.stride + begin,
                             static_cast<size_t>(end - begin) * sizeof(float));
               });
      step.context.pool.barrier();
      if (thread == 0) meet(step, num_rows * widest_);
      step.context.pool.barrier();
      if (sum_)
        add_up(step, slots, first, num_rows, thread);
      else
        put_side_by_side(step, slots, first, num_rows, thread);
    }
  }

 private:
  // An exception must not pass the threads that wait at a barrier.
  void meet(const Step& step, int64_t count) const {
    if (step.context.failure) return;
    try {
      group_->meet(count);
    } catch (...) {
      step.context.failure = std::current_exception();
    }
  }

  void add_up(const Step& step, const float* slots, int64_t first, int64_t num_rows,
              int thread) const {
    const Rows out = step.rows(out_);
    for_part(num_rows, widest_, thread, step.num_threads,
             [&](int64_t row, int64_t begin, int64_t end) {
               float* to = out.data + (first + row) * out.stride;
               const float* from = slots + row * widest_;
               for (int64_t i = begin; i < end; ++i) to[i] = from[i];
               for (int rank = 1; rank < group_->size; ++rank) {
                 from += Group::SLOT_FLOATS;
                 for (int64_t i = begin; i < end; ++i) to[i] += from[i];
               }
             });
  }

  void put_side_by_side(const Step& step, const float* slots, int64_t first, int64_t num_rows,
                        int thread) const {
    const Rows out = step.rows(out_);
    int64_t offset = 0;
    for (int rank = 0; rank < group_->size; ++rank) {
      const int64_t width = widths_[static_cast<size_t>(rank)];
      const float* from = slots + rank * Group::SLOT_FLOATS;
      for_part(num_rows, width, thread, step.num_threads,
               [&](int64_t row, int64_t begin, int64_t end) {
                 std::memcpy(out.data + (first + row) * out.stride + offset + begin,
                             from + row * width + begin,
                             static_cast<size_t>(end - begin) * sizeof(float));
               });
      offset += width;
    }
  }

  std::shared_ptr<Group> group_;
  View x_, out_;
  std::vector<int64_t> widths_;
  int64_t widest_;
  bool sum_;
};

}  // namespace

int64_t SharedGroup::num_bytes(int size) { return HEADER_BYTES + slot_bytes(size); }

SharedGroup::SharedGroup(void* memory, int rank_, int size_)
    : Group(rank_, size_), lines_(static_cast<Line*>(memory)) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  if (static_cast<int64_t>(sizeof(Line)) * size > HEADER_BYTES)
    throw std::invalid_argument("too many ranks");
  slots_ = reinterpret_cast<float*>(static_cast<char*>(memory) + HEADER_BYTES);
}

void SharedGroup::await(int64_t) {
  ++count_;
  // Sequentially consistent on both sides: either this rank sees the sleeper, or the sleeper sees
  // the new count before it parks.
  lines_[rank].count.store(count_, std::memory_order_seq_cst);
  if (lines_[rank].sleepers.load(std::memory_order_seq_cst)) wake_all(lines_[rank].count);
  for (int other = 0; other < size; ++other) {
    Line& line = lines_[other];
    const auto has_come = [&](uint32_t count) { return static_cast<int32_t>(count - count_) >= 0; };
    for (int i = 0; i < 2000; ++i) {
      if (has_come(line.count.load(std::memory_order_acquire))) break;
      pause();
    }
    const auto end = std::chrono::steady_clock::now() + YIELDING;
    while (!has_come(line.count.load(std::memory_order_acquire)) &&
           std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    if (has_come(line.count.load(std::memory_order_acquire))) continue;
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t seen = line.count.load(std::memory_order_seq_cst);
      if (has_come(seen)) break;
      park(line.count, seen);
    }
    line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

CallbackGroup::CallbackGroup(Exchange exchange, int rank_, int size_)
    : Group(rank_, size_), exchange_(std::move(exchange)), memory_(allocate(slot_bytes(size_))) {
  slots_ = reinterpret_cast<float*>(memory_.get());
}

void CallbackGroup::await(int64_t count) {
  exchange_(reinterpret_cast<uintptr_t>(slots()), count);
}

std::unique_ptr<Node> gather_node(std::shared_ptr<Group> group, View x, View out,
                                  std::vector<int64_t> widths, bool sum) {
  return std::make_unique<Gather>(std::move(group), x, out, std::move(widths), sum);
}

}  // namespace eyas
