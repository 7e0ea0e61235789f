#include "thread_pool.h"

#include <unistd.h>

#include <chrono>

namespace eyas {
namespace {

// Returns when `value` is no longer `old`: spins, then lets others have the core, then parks.
void await_change(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin) {
  for (int i = 0; i < 2000; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + spin;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    std::this_thread::yield();
  }
  value.wait(old, std::memory_order_acquire);
}

constexpr std::chrono::microseconds SPIN_IN_STEP{200};
constexpr std::chrono::microseconds SPIN_BETWEEN_STEPS{1000};

}  // namespace

ThreadPool::ThreadPool(int num_threads) : owner_(getpid()) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system has no more threads to give
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (owner_ == getpid())
    stop();
  else  // the threads are the parent's
    for (auto& worker : workers_) worker.detach();
}

void ThreadPool::stop() {
  stopping_ = true;
  started_.fetch_add(1, std::memory_order_seq_cst);
  started_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool ThreadPool::run(void (*function)(void*, int), void* argument) {
  if (workers_.empty()) {
    function(argument, 0);
    return true;
  }
  if (owner_ != getpid()) return false;
  function_ = function;
  argument_ = argument;
  started_.fetch_add(1, std::memory_order_seq_cst);
  started_.notify_all();
  function(argument, 0);
  barrier();
  return true;
}

void ThreadPool::barrier() {
  const uint32_t others = static_cast<uint32_t>(workers_.size());
  if (others == 0) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == others) {
    arrived_.store(0, std::memory_order_relaxed);
    // Sequentially consistent: libstdc++'s notify_all looks for sleepers first, and on x86 that look
    // could overtake a mere release, leaving one that has just fallen asleep there.
    phase_.store(phase + 1, std::memory_order_seq_cst);
    phase_.notify_all();
  } else {
    await_change(phase_, phase, SPIN_IN_STEP);
  }
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;; ++seen) {
    await_change(started_, seen, SPIN_BETWEEN_STEPS);
    if (stopping_) return;
    function_(argument_, thread);
    barrier();
  }
}

}  // namespace eyas
