// A fragment with what running it needs: where its operands are, an event for each instruction that
// something waits for, room for its transfers. Made once, so that a step allocates nothing; pointed
// again when the pools have moved.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/sharding/instructions.h"

namespace ebb {

class StreamOrder;

class LinkedFragment {
 public:
  // `plan`: the fragment has its operations; it outlives this. `order` then has the events.
  static absl::StatusOr<std::unique_ptr<LinkedFragment>> Link(sharding::Fragment fragment,
                                                              const sharding::Plan& plan,
                                                              const Device& device,
                                                              const Storage& storage,
                                                              StreamOrder& order);
  // Where the pools are now.
  void Point(const Storage& storage);

  const sharding::Plan& plan() const { return *plan_; }
  const sharding::Fragment& fragment() const { return fragment_; }
  int size() const { return static_cast<int>(fragment_.instructions.size()); }
  const sharding::Instruction& operator[](int instruction) const {
    return fragment_.instructions[static_cast<size_t>(instruction)];
  }
  // The unit that errors and timelines name; empty if there is none.
  std::string_view unit_name(int instruction) const;

  // Null where it is on the disk, or in the control block.
  std::byte* At(int instruction, int operand) const {
    return pointers_[Of(instruction).first + static_cast<size_t>(operand)];
  }
  // Addresses of its operands from `operand` on.
  std::span<std::byte* const> AllFrom(int instruction, int operand) const {
    return std::span(pointers_)
        .subspan(Of(instruction).first, (*this)[instruction].operands.size())
        .subspan(static_cast<size_t>(operand));
  }
  // For a collective, by section of a unit.
  std::span<const CollectiveSpan> spans(int instruction) const { return Of(instruction).spans; }
  // The number of its event in the streams' order; -1: nothing waits for it.
  int event(int instruction, int parity) const {
    return Of(instruction).events[static_cast<size_t>(parity)];
  }
  IoTransfer* transfers(int instruction) const { return Of(instruction).transfers.get(); }
  // When it began, for a timeline; whether its transfers were started.
  int64_t& begun(int instruction) { return linked_[static_cast<size_t>(instruction)].begun; }
  bool& started(int instruction) { return linked_[static_cast<size_t>(instruction)].started; }
  // The error of an instruction of a call for state.
  absl::Status& error(int instruction) { return linked_[static_cast<size_t>(instruction)].error; }

 private:
  LinkedFragment(sharding::Fragment fragment, const sharding::Plan& plan)
      : fragment_(std::move(fragment)), plan_(&plan) {}

  struct Linked {
    size_t first = 0;  // of pointers_
    std::span<const CollectiveSpan> spans = {};
    std::array<int, 2> events = {-1, -1};
    std::unique_ptr<IoTransfer[]> transfers = nullptr;
    int64_t begun = 0;
    bool started = false;
    absl::Status error = {};
  };
  const Linked& Of(int instruction) const { return linked_[static_cast<size_t>(instruction)]; }

  sharding::Fragment fragment_;
  const sharding::Plan* plan_;
  std::vector<Linked> linked_;        // by instruction
  std::vector<std::byte*> pointers_;  // of all operands
  sharding::Lists<CollectiveSpan> span_lists_;
  std::vector<std::unique_ptr<Event>> events_;
};

// The numbers that an all-gather moves, or bytes where its units have several dtypes.
DType GatheredDType(const sharding::Instruction& gather);

}  // namespace ebb
