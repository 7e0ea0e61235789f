// The thread pool: what a thread writes before a barrier, every thread reads after it. Plain memory
// on purpose, so that ThreadSanitizer sees whether the barrier alone orders it.
#include <chrono>
#include <memory>
#include <thread>

#include "check.h"
#include "thread_pool.h"

namespace eyas::test {
namespace {

struct Shared {
  ThreadPool& pool;
  std::vector<int64_t> slots;
  int num_barriers;
  int sleeper;  // a thread that comes late, so that the others park
  std::vector<int64_t> wrong;
};

void body(void* argument, int thread) {
  Shared& s = *static_cast<Shared*>(argument);
  const auto own = static_cast<size_t>(thread);
  for (int i = 0; i < s.num_barriers; ++i) {
    if (thread == s.sleeper) std::this_thread::sleep_for(std::chrono::microseconds(400));
    const int64_t before = s.slots[own];
    s.slots[own] = before + 1;
    s.pool.barrier();
    for (const int64_t slot : s.slots) s.wrong[own] += slot != before + 1;
    s.pool.barrier();
  }
  s.slots[own] += 1;
}

void run_case(Random& random, int num_threads, int num_runs) {
  ThreadPool pool(num_threads);
  const auto size = static_cast<size_t>(num_threads);
  if (pool.size() != num_threads) fail("pool: has %d threads", pool.size());
  Shared shared{pool, std::vector<int64_t>(size), 0, -1, std::vector<int64_t>(size)};
  int64_t expected = 0;
  for (int i = 0; i < num_runs; ++i) {
    const bool slow = random.one_in(20);
    shared.num_barriers = slow ? 2 : random.small(0, 20);
    shared.sleeper = slow ? random.small(0, num_threads - 1) : -1;
    if (random.one_in(40)) std::this_thread::sleep_for(std::chrono::microseconds(1500));
    if (!pool.run(body, &shared)) fail("pool: did not run");
    expected += shared.num_barriers + 1;
    for (size_t thread = 0; thread < size; ++thread)
      if (shared.slots[thread] != expected || shared.wrong[thread])
        fail("pool: a thread missed a run or a barrier");
  }
}

}  // namespace

void test_pool(Run run) {
  for (int i = 0; i < 10 * run.effort; ++i)
    for (int threads = 1; threads <= 4; ++threads)
      run_case(run.random, threads, run.random.one_in(3) ? run.random.small(0, 2) : 40);
}

}  // namespace eyas::test
