// An engine's swap files: one of a rank's parameters and one of all its other state. The plan's
// pools lay them out.
//
// Masters and states on NVMe have a second place on the disk while they are saved beside steps. The
// first update after the save's begin writes to the other place, so that the saved bytes stay until
// they have been read. No update waits for that.
//
//   first   | a | b | c |     the save reads a, b and c here
//   second  | a'| b'|   |     updates of a and b have come: steps go on with these
//
// The next save finds a and b in the second place, and their updates go back to the first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/plan.h"

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
  // Where the place is now, to read it or to write a part of it. Any thread that comes after the
  // last write of this place.
  ShardFile& File(const sharding::Place& place) const;
  // Where the newest save finds it, even if it was written since the save began.
  ShardFile& SavedFile(const sharding::Place& place) const;

  // Makes the second file, which a save beside steps needs if masters or states are on NVMe. Does
  // nothing the second time. kResourceExhausted: the disk has no room for that file and the
  // checkpoint.
  absl::Status TakeSecondPlaces();
  bool has_second_places() const { return second_file_ != nullptr; }
  // On the engine's thread: writes issued from now on leave the present bytes to the save, if there
  // are second places. The save before has ended.
  void BeginSave() {
    if (has_second_places()) ++save_;
  }
  // The number of a write that is issued now.
  uint32_t save() const { return save_; }
  // Moves a whole array to the place where an update with this number writes it. Returns true if
  // the place has changed.
  bool MoveTo(const sharding::Place& place, uint32_t save);

 private:
  static absl::Status CreateFile(ShardFile::Options& options, std::unique_ptr<ShardFile>& file);
  void ListArrays();
  void Charge();
  // Index of the array of masters or states that holds the place; -1: none does.
  int ArrayAt(const sharding::Place& place) const;
  ShardFile& StateFile(bool in_second) const { return in_second ? *second_file_ : *state_file_; }

  const sharding::Plan* plan_;
  MemoryLedger* ledger_;
  int ranks_on_host_ = 1;
  std::unique_ptr<ShardFile> parameter_file_, state_file_, second_file_;
  ShardFile::Options state_options_;
  MemoryLedger::Charge charges_[kStateClasses], in_second_[2];
  // Arrays of masters and states, by their offsets in the file, ascending; and where the last ends.
  std::vector<int64_t> begins_;
  int64_t end_ = 0;
  // By array, the number of the save that moved it last; bit 32: it is in the second place.
  std::vector<std::atomic<uint64_t>> moved_;
  uint32_t save_ = 0;
};

}  // namespace ebb
