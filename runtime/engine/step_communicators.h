// The communicators of an engine's steps, seen together: what broke first and at which operation, and how
// all ranks are told of it.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/host_lane.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_peers.h"

namespace ebb {

class StepCommunicators : public StepPeers {
 public:
  struct Parts {  // borrowed, and made later than this object
    std::array<std::optional<Communicator>*, 5> of_steps = {};
    std::optional<Communicator>* control = nullptr;  // of the world, outside of steps
    const Device* device = nullptr;
    const std::vector<Event>* concluded = nullptr;  // by parity
    std::optional<Stream>* reduce = nullptr;
    std::array<std::optional<Stream>*, 2> updates = {};
    DeviceMirror* mirror = nullptr;
    const World* world = nullptr;
    double timeout_seconds = 0;
  };
  explicit StepCommunicators(const Parts& parts) : with_(parts) {}

  void AwaitConclusion(int parity) override;
  void AwaitUpdates() override;
  absl::Status Broken() const override;
  absl::Status DeviceFailure() const override { return with_.device->status(); }
  std::string WhereBroken(const absl::Status& broken) const override;
  void Abort(const absl::Status& why) override;
  void Withdraw(const absl::Status& why) override { (*with_.control)->Abort(why); }
  absl::StatusOr<std::vector<std::vector<int64_t>>> Logs(std::span<const int64_t> own,
                                                         const absl::Status& broken) override;

  // What came of enqueuing a collective. One that one rank alone does not enqueue would pair its later ones
  // with the wrong ones of the others.
  void NoteCollective(Communicator& communicator, absl::Status status, StepErrors& errors);
  // On an operation's stream, after it: `communicator` may have failed with it, and `where` says in words
  // which operation it is. Only the first failure is kept.
  void NoteIfBroken(const Communicator& communicator, absl::FunctionRef<std::string()> where);

  const std::array<std::optional<Communicator>*, 5>& of_steps() const { return with_.of_steps; }

 private:
  const Parts with_;
  mutable std::mutex mutex_;
  absl::Status broken_;
  std::string broken_at_;
};

}  // namespace ebb
