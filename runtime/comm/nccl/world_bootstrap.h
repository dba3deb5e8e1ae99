// A Bootstrap over a world that connects the same ranks on the CPU, threads or processes: what the
// ranks tell each other goes through its communicators, and its failures are heard.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ebb/runtime/comm/nccl/bootstrap.h"
#include "ebb/runtime/comm/world.h"

namespace ebb {

class WorldBootstrap : public Bootstrap {
 public:
  // Collective.
  static absl::StatusOr<std::shared_ptr<WorldBootstrap>> Create(World world);
  ~WorldBootstrap() override;

  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  int local_rank() const override { return world_.local_rank(); }
  int local_size() const override { return world_.local_size(); }
  int ranks_per_host() const override { return world_.ranks_per_host(); }

  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine,
                                                     double timeout_seconds) override;
  void Fail(const absl::Status& why) override { world_.Fail(why); }
  CallOrder* calls() override { return world_.calls(); }
  void TellCalls() override { world_.TellCalls(); }
  void OnFailure(std::function<void(const absl::Status& why)> heard) override;
  absl::StatusOr<std::unique_ptr<Farewells>> NewFarewells(double timeout_seconds) override;

 private:
  WorldBootstrap(World world, Communicator watched)
      : world_(std::move(world)), watched_(std::move(watched)) {}
  void Watch();

  const World world_;
  const Communicator watched_;  // fails when the world does; nothing runs on it
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  std::function<void(const absl::Status& why)> heard_;
  std::thread watcher_;
};

}  // namespace ebb
