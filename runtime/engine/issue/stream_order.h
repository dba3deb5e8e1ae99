// Orders an engine's streams: an operation on one stream comes after the last uses of its memory
// cells on all others. Within a list this order is planned; between lists the frontier
// knows it; all other work comes between fences.
#pragma once

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/sharding/frontier.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/waits.h"

namespace ebb {

class LinkedList;

class StreamOrder {
 public:
  // By line; null: nothing starts or ends there.
  using Streams = std::array<Stream*, sharding::kLines>;
  // `cells` outlive this.
  StreamOrder(const Streams& streams, const sharding::Cells& cells, int units)
      : streams_(streams), cells_(cells), control_(units), frontier_(cells.count()) {}
  absl::Status MakeFence(const Device& device);
  // Adds a stream that did not exist so far.
  void UseStream(sharding::Line line, Stream& stream) { streams_[line] = &stream; }
  Stream& At(sharding::Line line) const { return *streams_[line]; }
  // The number of an event in lists, for operations that end on `line`. `event` outlives this.
  int AddEvent(sharding::Line line, Event& event);

  // Around an operation: its stream waits, then leaves its event. Evaluations have no parity.
  void Await(const LinkedList& run, int op, int parity);
  void Leave(const LinkedList& run, int op, int parity);
  // For an operation outside of steps: its stream waits for all uses of its operands.
  void AwaitUses(const sharding::Op& op);

  // Every stream comes after all work issued on any. Reads beside steps are left out, because they
  // may take long. For work outside of lists, which writes nothing that they read.
  void Fence();
  // The list has ended early: the next one waits for all such work, as far as it uses cells.
  void EndEarly();
  // The caller waits for all uses of the control block's cells of this parity.
  void AwaitParity(int parity);
  // The compute stream waits for the decision on the loss scale.
  void AwaitScale();
  // The caller waits for all issued work, or for all of steps and evaluations.
  void WaitIdle();
  void WaitForSteps();

 private:
  // Calls `visit(line)` for each line of steps and evaluations.
  template <class Visit>
  void ForEachOfSteps(Visit visit) const {
    for (sharding::Line line = 0; line < sharding::kLines; ++line)
      if (streams_[line] != nullptr && line != sharding::kAsyncReads) visit(line);
  }
  void Wait(sharding::Line line, int event) { At(line).Wait(*events_[static_cast<size_t>(event)]); }

  Streams streams_;
  const sharding::Cells& cells_;
  const sharding::ControlCells control_;
  sharding::Frontier frontier_;
  std::vector<Event> fence_;                 // by line
  std::vector<int> floor_;                   // likewise: its number in the frontier
  std::vector<Event*> events_;               // by their numbers in the frontier
  std::vector<sharding::CellRange> ranges_;  // of AwaitUses
  std::vector<sharding::CellUse> uses_;
};

}  // namespace ebb
