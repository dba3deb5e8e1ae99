// What orders an engine's streams: what starts on one comes after the last uses, on all others, of the cells of memory
// that it uses. In a fragment that is known before; between fragments the frontier knows it, and what no fragment has
// comes between fences.
#pragma once

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/sharding/frontier.h"
#include "ebb/sharding/instructions.h"
#include "ebb/sharding/waits.h"

namespace ebb {

class LinkedFragment;

class StreamOrder {
 public:
  // By line; null: nothing starts or ends there.
  using Streams = std::array<Stream*, sharding::kLines>;
  // `cells` outlive this.
  StreamOrder(const Streams& streams, const sharding::Cells& cells, int units)
      : streams_(streams), cells_(cells), control_(units), frontier_(cells.count()) {}
  absl::Status MakeFence(const Device& device);
  // A stream that there was none of so far.
  void UseStream(sharding::Line line, Stream& stream) { streams_[line] = &stream; }
  Stream& At(sharding::Line line) const { return *streams_[line]; }
  // The number by which a fragment knows an event, of things that end on `line`. It outlives this.
  int AddEvent(sharding::Line line, Event& event);

  // Around an instruction of a step of this parity (an evaluation has nothing by parity): its stream waits for what it says, and leaves its event.
  void Await(const LinkedFragment& run, int instruction, int parity);
  void Leave(const LinkedFragment& run, int instruction, int parity);
  // Of an instruction of no step: its stream waits for all that used what it touches.
  void AwaitUses(const sharding::Instruction& instruction);

  // Every stream comes after all that was issued on any. For what no fragment has.
  void Fence();
  // The fragment has ended early: what comes next waits for all that was issued, as far as it enters anything.
  void EndEarly();
  // The caller waits for what has used, of the control block, what is there by this parity.
  void AwaitParity(int parity);
  // The compute stream waits for what decides the loss scale.
  void AwaitScale();
  // The caller waits for all that was issued, or for all of steps and evaluations.
  void WaitIdle();
  void WaitForSteps();

 private:
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
