// An engine's swap files: one of a rank's parameters and one of all its other state. With second
// places for saves beside steps. The plan's pools lay them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/offload/second_places.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

class SwapStorage {
 public:
  // `plan` and `ledger` outlive this.
  SwapStorage(const sharding::Plan& plan, MemoryLedger& ledger) : plan_(&plan), ledger_(&ledger) {}

  // `staging`: host memory that transfers are of, registered with the files.
  // `ranks_on_host`: that put as much on the disk, for the message that it is full.
  // `name`: of the engine and the rank, for messages.
  absl::Status Create(const Config& config, std::span<std::byte> staging, int ranks_on_host,
                      std::string_view name);
  // Whether there are files for all that this plan has on the disk.
  absl::Status HasFilesFor(const sharding::Plan& plan) const;
  // Takes another plan that keeps parameters, masters and states where they are. Between transfers;
  // before the old staging goes, without one.
  absl::Status FollowPlan(std::span<std::byte> staging);

  bool exist() const { return parameter_file_ != nullptr || state_file_ != nullptr; }
  ShardFile& File(const sharding::Place& place) const;  // where it is now

  // Makes the second file, which a save beside steps needs. Does nothing the second time.
  // kResourceExhausted: the disk has no room for that file and the checkpoint.
  absl::Status TakeSecondPlaces(const sharding::SwapFiles& files, int ranks_on_host);
  ShardFile& SavedFile(const sharding::Place& place) const;  // where the save under way finds it
  SecondPlaces* second_places() const { return second_places_.get(); }

 private:
  static absl::Status CreateFile(ShardFile::Options& options, std::unique_ptr<ShardFile>& file);
  void Charge();

  const sharding::Plan* plan_;
  MemoryLedger* ledger_;
  std::unique_ptr<ShardFile> parameter_file_, state_file_;
  ShardFile::Options state_options_;
  std::unique_ptr<SecondPlaces> second_places_;
  MemoryLedger::Charge charges_[kStateClasses], in_second_[2];
};

}  // namespace ebb
