// The communicators of an engine's steps together: the first failure with its operation, and how
// all ranks get it.
#pragma once

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/outcome/step_peers.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"

namespace ebb {

class StepCommunicators : public StepPeers {
 public:
  // The communicators are made later than this object.
  StepCommunicators(const EngineInputs& inputs, EngineCommunicators& communicators,
                    EngineStreams& streams)
      : inputs_(inputs), communicators_(communicators), streams_(streams) {}

  void AwaitConclusion(int parity) override;
  void AwaitUpdates() override;
  absl::Status Broken() const override;
  absl::Status DeviceFailure() const override { return inputs_.device.status(); }
  std::string WhereBroken(const absl::Status& broken) const override;
  void Abort(const absl::Status& why) override;
  void Withdraw(const absl::Status& why) override { communicators_.control().Abort(why); }
  absl::StatusOr<std::vector<std::vector<int64_t>>> Logs(std::span<const int64_t> own,
                                                         const absl::Status& broken) override;

  // Notes the result of enqueuing a collective. If one rank alone did not enqueue it, that rank's
  // later collectives would be paired with the wrong ones of the others.
  void NoteCollective(Communicator& communicator, absl::Status status, StepErrors& errors);
  // On an operation's stream, behind the operation: notes it if `communicator` has failed; `where`
  // names the operation. Only the first failure is kept.
  void NoteIfBroken(const Communicator& communicator, absl::FunctionRef<std::string()> where);

 private:
  const EngineInputs& inputs_;
  EngineCommunicators& communicators_;
  EngineStreams& streams_;
  mutable std::mutex mutex_;
  absl::Status broken_;
  std::string broken_at_;
};

}  // namespace ebb
