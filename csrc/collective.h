// Collectives among the ranks that run one model together, each a process (or, in tests, a thread
// with a pool of its own): every rank's floats reach every rank, and each then puts them side by
// side or adds them up by itself, in rank order. So all ranks have the same bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "program.h"

namespace eyas {

// Where ranks meet. Each has a slot per exchange; slots alternate between two sets: who writes its
// slot of the exchange after the next has met everybody in the next, so nobody reads the old one.
class Group {
 public:
  static constexpr int64_t SLOT_FLOATS = 1 << 20;

  Group(int rank_, int size_) : rank(rank_), size(size_) {}
  Group(const Group&) = delete;
  virtual ~Group() = default;

  // All ranks' slots of the exchange under way, `SLOT_FLOATS` apart.
  float* slots() const { return slots_ + phase_ * size * SLOT_FLOATS; }
  // Called by one thread when the first `count` floats of this rank's slot are written: returns when
  // every rank's are there, and `slots` are then the next exchange's. All ranks give one `count`.
  void meet(int64_t count) {
    await(count);
    phase_ = 1 - phase_;
  }

  const int rank, size;

 protected:
  virtual void await(int64_t count) = 0;
  static int64_t slot_bytes(int size) { return 2 * size * SLOT_FLOATS * 4; }

  float* slots_ = nullptr;
  int64_t phase_ = 0;
};

// Over memory that all ranks have mapped, zero at first. Waits spin, then yield, then park.
class SharedGroup : public Group {
 public:
  static int64_t num_bytes(int size);
  SharedGroup(void* memory, int rank, int size);

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> count;     // exchanges that the rank has come to
    std::atomic<uint32_t> sleepers;  // who waits for it
  };
  void await(int64_t count) override;

  Line* lines_;
  uint32_t count_ = 0;
};

// Whoever `exchange` asks moves the floats: between the slots that begin at an address.
class CallbackGroup : public Group {
 public:
  using Exchange = std::function<void(uintptr_t slots, int64_t count)>;
  CallbackGroup(Exchange exchange, int rank, int size);

 private:
  void await(int64_t count) override;

  Exchange exchange_;
  Bytes memory_;
};

// x: this rank's columns, widths[rank] of them. out: all ranks' side by side or, `sum`, added up.
std::unique_ptr<Node> gather_node(std::shared_ptr<Group> group, View x, View out,
                                  std::vector<int64_t> widths, bool sum);

}  // namespace eyas
