// The common part of communicators with operations that run on the CPU. Each operation is a task of
// the stream it was enqueued on, and operations run in the order of their calls, even on different
// streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class TaskCommunicator : public CommunicatorBackend {
 public:
  absl::Status Enqueue(Stream& stream, const Collective& call) override;

 protected:
  explicit TaskCommunicator(double timeout_seconds) : timeout_seconds_(timeout_seconds) {}

  virtual void Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) = 0;
  virtual bool failed() = 0;
  // `call` has waited too long for the call before it of this rank.
  virtual void FailBehindAnother(const Collective& call) = 0;
  // The destructor of a derived class calls it first.
  void AwaitAllEnded();

 private:
  struct Ended {
    std::atomic<uint64_t> count{0};
    WaitPoint changed;
  };
  void RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team);

  const double timeout_seconds_;
  uint64_t taken_ = 0;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();
};

}  // namespace ebb
