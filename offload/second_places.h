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
#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/offload/shard_file.h"
#include "ebb/sharding/place.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

class SecondPlaces {
 public:
  // `second`: as long as the part of `first` with masters and states. `first` outlives this.
  SecondPlaces(const sharding::SwapFiles& files, ShardFile& first,
               std::unique_ptr<ShardFile> second);
  // Bytes of the states' file from its begin on, up to where the last array of masters and states
  // ends.
  static int64_t BytesOf(const sharding::SwapFiles& files);

  // On the engine's thread: writes issued from now on leave the present bytes to the save. The save
  // before has ended.
  void BeginSave() { ++save_; }
  // The number of a write that is issued now.
  uint32_t save() const { return save_; }

  // The place to read, or to write a part of. Anything but masters and states is in the first
  // place. Any thread that comes after the last write of this place.
  ShardFile& Current(const sharding::Place& place) const;
  // Moves a whole array to the place where an update with this number writes it. Returns true if
  // the place has changed.
  bool MoveTo(const sharding::Place& place, uint32_t save);
  // Where the newest save finds it, even if it was written since the save began.
  ShardFile& Saved(const sharding::Place& place) const;

  ShardFile& second() const { return *second_; }

 private:
  static constexpr uint64_t kInSecond = uint64_t{1} << 32;
  // Index of the array that holds the place; -1: none does.
  int Find(const sharding::Place& place) const;
  ShardFile& FileOf(bool in_second) const { return in_second ? *second_ : *first_; }

  std::vector<int64_t> begins_;  // of the arrays, as offsets in the file, ascending
  // By array, the number of the save that moved it last, with kInSecond if it is in the second
  // place.
  std::vector<std::atomic<uint64_t>> moved_;
  int64_t end_ = 0;
  ShardFile* first_;
  std::unique_ptr<ShardFile> second_;
  uint32_t save_ = 0;
};

}  // namespace ebb
