// A list with what running it needs: where its operands are, an event for each operation that
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
#include "ebb/sharding/op_list.h"

namespace ebb {

class StreamOrder;

class LinkedList {
 public:
  // `plan`: the list has its operations; it outlives this. `order` then has the events.
  static absl::StatusOr<std::unique_ptr<LinkedList>> Link(sharding::OpList list,
                                                          const sharding::Plan& plan,
                                                          const Device& device,
                                                          const Storage& storage,
                                                          StreamOrder& order);
  // Where the pools are now.
  void Point(const Storage& storage);

  const sharding::Plan& plan() const { return *plan_; }
  const sharding::OpList& list() const { return list_; }
  int size() const { return static_cast<int>(list_.ops.size()); }
  const sharding::Op& operator[](int op) const { return list_.ops[static_cast<size_t>(op)]; }
  const sharding::Waits& waits(int op) const { return list_.waits[op]; }
  // The unit that errors and timelines name; empty if there is none.
  std::string_view unit_name(int op) const;

  // Null where it is on the disk, or in the control block.
  std::byte* At(int op, int operand) const {
    return pointers_[Of(op).first + static_cast<size_t>(operand)];
  }
  // Addresses of its operands from `operand` on.
  std::span<std::byte* const> AllFrom(int op, int operand) const {
    return std::span(pointers_)
        .subspan(Of(op).first, (*this)[op].operands.size())
        .subspan(static_cast<size_t>(operand));
  }
  // For a collective, by section of a unit.
  std::span<const CollectiveSpan> spans(int op) const { return Of(op).spans; }
  // The number of its event in the streams' order; -1: nothing waits for it.
  int event(int op, int parity) const { return Of(op).events[static_cast<size_t>(parity)]; }
  IoTransfer* transfers(int op) const { return Of(op).transfers.get(); }
  // When it began, for a timeline; whether its transfers were started.
  int64_t& begun(int op) { return linked_[static_cast<size_t>(op)].begun; }
  bool& started(int op) { return linked_[static_cast<size_t>(op)].started; }
  // The error of an operation of a call for state.
  absl::Status& error(int op) { return linked_[static_cast<size_t>(op)].error; }

 private:
  LinkedList(sharding::OpList list, const sharding::Plan& plan)
      : list_(std::move(list)), plan_(&plan) {}

  std::vector<CollectiveSpan> SpansOfMatrices(const sharding::Op& op, std::byte* from,
                                              std::byte* to, int slice) const;

  struct Linked {
    size_t first = 0;  // of pointers_
    std::span<const CollectiveSpan> spans = {};
    std::array<int, 2> events = {-1, -1};
    std::unique_ptr<IoTransfer[]> transfers = nullptr;
    int64_t begun = 0;
    bool started = false;
    absl::Status error = {};
  };
  const Linked& Of(int op) const { return linked_[static_cast<size_t>(op)]; }

  sharding::OpList list_;
  const sharding::Plan* plan_;
  std::vector<Linked> linked_;        // by operation
  std::vector<std::byte*> pointers_;  // of all operands
  sharding::Lists<CollectiveSpan> span_lists_;
  std::vector<std::unique_ptr<Event>> events_;
};

// The numbers that an all-gather moves, or bytes where its units have several dtypes.
DType GatheredDType(const sharding::Op& gather);

}  // namespace ebb
