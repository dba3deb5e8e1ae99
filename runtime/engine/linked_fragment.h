// A fragment with what running it needs: where its operands are, an event for each instruction that something
// waits for, room for its transfers. Made once, so that a step allocates nothing; pointed again when the pools
// have moved.
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
#include "ebb/runtime/engine/storage.h"
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
  // Of the unit that errors and timelines name; empty where there is none.
  std::string_view unit_name(int instruction) const;

  // Null where it is on the disk, or in the control block.
  std::byte* At(int instruction, int operand) const {
    return pointers_[static_cast<size_t>(first_[static_cast<size_t>(instruction)] + operand)];
  }
  // Of its operands from one on.
  std::span<std::byte* const> AllFrom(int instruction, int operand) const {
    const size_t end = static_cast<size_t>(first_[static_cast<size_t>(instruction)]) +
                       (*this)[instruction].operands.size(),
                 begin = static_cast<size_t>(first_[static_cast<size_t>(instruction)] + operand);
    return std::span(pointers_).subspan(begin, end - begin);
  }
  // Of a collective, by section of a unit.
  std::span<const CollectiveSpan> spans(int instruction) const {
    return spans_[static_cast<size_t>(instruction)];
  }
  // The number of its event in the streams' order; -1: nothing waits for it.
  int event(int instruction, int parity) const {
    return event_numbers_[static_cast<size_t>(instruction)][static_cast<size_t>(parity)];
  }
  IoTransfer* transfers(int instruction) const {
    return transfers_[static_cast<size_t>(instruction)].get();
  }
  // When it began, for a timeline; whether its transfers were started.
  int64_t& begun(int instruction) { return begun_[static_cast<size_t>(instruction)]; }
  uint8_t& started(int instruction) { return started_[static_cast<size_t>(instruction)]; }
  // What went wrong in it, of a call for state.
  absl::Status& error(int instruction) { return errors_[static_cast<size_t>(instruction)]; }

 private:
  LinkedFragment(sharding::Fragment fragment, const sharding::Plan& plan)
      : fragment_(std::move(fragment)), plan_(&plan) {}

  sharding::Fragment fragment_;
  const sharding::Plan* plan_;
  std::vector<int> first_;  // by instruction: its first operand's pointer
  std::vector<std::byte*> pointers_;
  sharding::Lists<CollectiveSpan> span_lists_;
  std::vector<std::span<const CollectiveSpan>> spans_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::array<int, 2>> event_numbers_;
  std::vector<std::unique_ptr<IoTransfer[]>> transfers_;
  std::vector<int64_t> begun_;
  std::vector<uint8_t> started_;
  std::vector<absl::Status> errors_;
};

// What an all-gather moves: numbers, or bytes where its units have several dtypes.
DType GatheredDType(const sharding::Instruction& gather);

}  // namespace ebb
