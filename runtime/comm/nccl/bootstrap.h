// How the ranks of a world reach each other beside the GPUs: what NCCL needs before it can connect
// them, and what it cannot tell, namely that a rank has failed, has left a communicator, or that
// its process has ended. The rendezvous of processes implements it; in tests, threads do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/farewells.h"

namespace ebb {

class CallOrder;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  // among the ranks of this host
  virtual int local_size() const = 0;
  virtual int ranks_per_host() const = 0;  // as WorldBackend's

  // Every rank's text, by rank; a few hundred bytes. Collective: all ranks call it in the same
  // order, one thread a rank. Waits at most `timeout_seconds` for ranks that have not come. An
  // error on one rank is one on all, and names the missing one.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine,
                                                             double timeout_seconds) = 0;

  // Tells all other ranks that this one has given up; does not wait for them. Any thread.
  virtual void Fail(const absl::Status& why) = 0;
  // `heard` is called, on any thread, when another rank has failed ("rank 2 failed: ...") or its
  // process has ended: at once if that has happened already. One for a world, before it is used.
  virtual void OnFailure(std::function<void(const absl::Status& why)> heard) = 0;

  // As WorldBackend's; and what others do not see of it, they are told. Any thread.
  virtual CallOrder* calls() { return nullptr; }
  virtual void TellCalls() {}

  // Of a communicator between all ranks. Collective, as AllGather, which may wait.
  virtual absl::StatusOr<std::unique_ptr<Farewells>> NewFarewells(double timeout_seconds) = 0;
};

}  // namespace ebb
