#include "ebb/runtime/engine/issue/issue_observer.h"

#include <atomic>

namespace ebb {
namespace {

std::atomic<MakeIssueObserver> make_observer = nullptr;

}  // namespace

void SetIssueObserver(MakeIssueObserver make) {
  make_observer = make;
}

std::unique_ptr<IssueObserver> NewIssueObserver(const ObservedEngine& engine) {
  const MakeIssueObserver make = make_observer;
  return make == nullptr ? nullptr : make(engine);
}

}  // namespace ebb
