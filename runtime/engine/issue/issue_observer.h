// Sees every operation when it is issued, in the order of the streams. Timelines use it, and
// checks of the order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/issue/step_tag.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/control_block.h"

namespace ebb {

class IssueObserver {
 public:
  virtual ~IssueObserver() = default;

  // On the thread that calls the engine: `stream` comes to the operation next, ...
  virtual void Begin(LinkedList& run, int op, const StepTag& step, Stream& stream) = 0;
  // ... and `stream`, perhaps another one for a transfer, has come to the operation's end.
  virtual void End(LinkedList& run, int op, const StepTag& step, Stream& stream) = 0;

  // The calling thread is about to touch the control block itself.
  enum class CallerTouch : uint8_t { kBeginLoss, kBeginRecord, kReadScale };
  virtual void Touch(CallerTouch, int /*parity*/) {}
};

// All observers of an engine's operations; borrowed.
class IssueObservers {
 public:
  void Add(IssueObserver& observer) { observers_.push_back(&observer); }
  void Begin(LinkedList& run, int op, const StepTag& step, Stream& stream) const {
    for (IssueObserver* observer : observers_) observer->Begin(run, op, step, stream);
  }
  void End(LinkedList& run, int op, const StepTag& step, Stream& stream) const {
    for (IssueObserver* observer : observers_) observer->End(run, op, step, stream);
  }
  void Touch(IssueObserver::CallerTouch touch, int parity) const {
    for (IssueObserver* observer : observers_) observer->Touch(touch, parity);
  }

 private:
  std::vector<IssueObserver*> observers_;
};

// An observer of each engine that is made, for programs that check the order of what engines
// enqueue: they define the function (issue_observer.cc). Null: there is none.
struct ObservedEngine {
  const Device* device = nullptr;
  const Storage* storage = nullptr;
  const ControlBlock* control = nullptr;
};
std::unique_ptr<IssueObserver> NewIssueObserver(const ObservedEngine& engine);

}  // namespace ebb
