// Masters and states on NVMe have a second place on the disk while they are saved beside steps: the first update behind
// the save's begin writes to the other place, so that what is saved stays where it is until it has been read. No update
// waits for that.
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
  // `second`: as long as the arrays of masters and states lie in `first`, which outlives this.
  SecondPlaces(const sharding::SwapFiles& files, ShardFile& first,
               std::unique_ptr<ShardFile> second);
  // Bytes of the states' file from its begin on, up to where the last array of masters and states ends.
  static int64_t BytesOf(const sharding::SwapFiles& files);

  // Of the engine's thread: writes that are issued from now on leave what is there to the save. The save before has
  // ended.
  void BeginSave() { ++save_; }
  // The number that a write which is issued now has.
  uint32_t save() const { return save_; }

  // Where it is read, and where a part of it is written. What is not of masters and states is in the first place. Any
  // thread that comes after the last write of this place.
  ShardFile& Current(const sharding::Place& place) const;
  // Moves a whole array to where an update writes it that was issued with this number. True: it is the other place than
  // before.
  bool MoveTo(const sharding::Place& place, uint32_t save);
  // Where the newest save finds it, whatever was written since that began.
  ShardFile& Saved(const sharding::Place& place) const;

  ShardFile& second() const { return *second_; }

 private:
  // The number of the save that moved it last, and above that whether it is in the second place.
  static constexpr uint64_t kInSecond = uint64_t{1} << 32;
  struct Array {
    explicit Array(int64_t offset) : begin(offset) {}
    Array(Array&& other) noexcept : begin(other.begin), moved(other.moved.load()) {}
    Array& operator=(Array&& other) noexcept {
      begin = other.begin;
      moved = other.moved.load();
      return *this;
    }
    int64_t begin = 0;  // offset in the file
    std::atomic<uint64_t> moved{0};
  };
  // Index of the array that holds it; -1: it is in none.
  int Find(const sharding::Place& place) const;
  const Array& At(int array) const { return arrays_[static_cast<size_t>(array)]; }
  ShardFile& FileOf(bool in_second) const { return in_second ? *second_ : *first_; }

  std::vector<Array> arrays_;  // by offset
  int64_t end_ = 0;
  ShardFile* first_;
  std::unique_ptr<ShardFile> second_;
  uint32_t save_ = 0;
};

}  // namespace ebb
