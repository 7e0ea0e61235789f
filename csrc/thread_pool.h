// A pool of threads that run one function together and meet at barriers.
//
// Steps follow each other within microseconds, so threads spin for a while before they park. There
// are as many threads as asked for, the caller's included, whatever other libraries have.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace eyas {

// Tells the core that this thread spins.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // throws std::system_error if threads run out
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls function(argument, thread) on every thread, 0 being the caller, and returns when all
  // have returned. One call at a time. False in a forked child, which has no workers.
  bool run(void (*function)(void*, int), void* argument);

  // Within run: returns when every thread has called it.
  void barrier();

 private:
  void work(int thread);
  void stop();

  std::vector<std::thread> workers_;
  void (*function_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  long owner_;  // the process that has the workers
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace eyas
