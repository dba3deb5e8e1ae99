// Sees every instruction as it is issued, in the order of the streams: for timelines, and for programs that
// check the order of what is enqueued.
#pragma once

#include <cstdint>
#include <memory>

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/runtime/engine/step_tag.h"
#include "ebb/runtime/engine/storage.h"

namespace ebb {

class IssueObserver {
 public:
  virtual ~IssueObserver() = default;

  // By the thread that calls the engine: `stream` comes to the instruction next, ...
  virtual void Begin(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) = 0;
  // ... and, where transfers end on another one, `stream` has come to its end.
  virtual void End(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) = 0;

  // That thread is about to touch the control block itself.
  enum class CallerTouch : uint8_t { kBeginLoss, kBeginRecord, kReadScale };
  virtual void Touch(CallerTouch, int /*parity*/) {}
};

// For programs that check the order of what engines enqueue: what is made for each engine from now on. Null, as at
// first: nothing.
struct ObservedEngine {
  const Device* device = nullptr;
  const Storage* storage = nullptr;
  const ControlBlock* control = nullptr;
};
using MakeIssueObserver = std::unique_ptr<IssueObserver> (*)(const ObservedEngine& engine);
void SetIssueObserver(MakeIssueObserver make);
std::unique_ptr<IssueObserver> NewIssueObserver(const ObservedEngine& engine);

}  // namespace ebb
