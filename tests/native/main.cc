// native_tests [--seed N] [--effort N] [suite ...]
//
// Runs the suites (all by default), those of kernels once per instruction set that this machine has.
#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "check.h"

namespace eyas::test {
namespace {

struct Suite {
  const char* name;
  void (*run)(const KernelTable&, Run);
};
constexpr Suite SUITES[] = {{"linear", test_linear},
                            {"rowwise", test_rowwise},
                            {"attention", test_attention},
                            {"program", test_program}};

template <class Function>
bool passes(const std::string& name, Function run) {
  const auto start = std::chrono::steady_clock::now();
  std::string error;
  try {
    run();
  } catch (const std::exception& e) {
    error = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%-20s %s (%.1f s)\n", name.c_str(), error.empty() ? "ok" : error.c_str(),
              took.count());
  std::fflush(stdout);
  return error.empty();
}

int main(int argc, char** argv) {
  uint64_t seed = 1;
  int effort = 1;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--effort" && i + 1 < argc) {
      effort = std::atoi(argv[++i]);
    } else if (argument == "pool" ||
               std::any_of(std::begin(SUITES), std::end(SUITES),
                           [&](const Suite& suite) { return argument == suite.name; })) {
      wanted.push_back(argument);
    } else {
      std::fprintf(stderr, "unknown argument '%s'\n", argument.c_str());
      return 2;
    }
  }
  const auto is_wanted = [&](const std::string& name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  bool all_pass = true;
  if (is_wanted("pool")) all_pass &= passes("pool", [&] { test_pool({Random(seed), effort}); });
  for (const KernelTable* const* table = kernel_tables(); *table; ++table) {
    if (!is_supported(**table)) {
      std::printf("%-20s not on this machine\n", (*table)->name);
      continue;
    }
    for (const Suite& suite : SUITES)
      if (is_wanted(suite.name))
        all_pass &= passes(std::string((*table)->name) + " " + suite.name,
                           [&] { suite.run(**table, {Random(seed), effort}); });
  }
  return all_pass ? 0 : 1;
}

}  // namespace
}  // namespace eyas::test

int main(int argc, char** argv) { return eyas::test::main(argc, argv); }
