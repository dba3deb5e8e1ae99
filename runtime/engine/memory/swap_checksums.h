// Checksums of this rank's swap files. If another program changes the files, or a disk returns
// wrong bytes, training ends (ebb.verify_swap). With "states" only masters and states have
// checksums, and parameters that are masters or halves of them.
//
// A step writes an extent (sharding/swap_files.h) in one go, and several extents at once. A
// smaller write from outside makes an extent unknown, until the whole extent is written, or
// read if it is not masters or states. Several streams may look at extents, in the order of the
// plan.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/sharding/state.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

// By class, bytes of a rank's files.
using ClassBytes = std::array<int64_t, kStateClasses>;
// Bytes without a checksum; with kOff all.
ClassBytes BytesWithoutChecksum(const sharding::SwapFiles& files, VerifySwap verify);
// For people: "gradients and activations", "" if all classes have checksums.
std::string ClassesWithoutChecksum(const sharding::SwapFiles& files, VerifySwap verify);

class SwapChecksums {
 public:
  class Extent {
   public:
    explicit Extent(const sharding::SwapExtent& of) : of_(of) {}
    Extent(Extent&& other) noexcept
        : of_(other.of_),
          checksum_(other.checksum_.load()),
          before_(other.before_.load()),
          saved_{other.saved_[0].load(), other.saved_[1].load()} {}
    Extent& operator=(Extent&& other) noexcept {
      of_ = other.of_;
      checksum_ = other.checksum_.load();
      before_ = other.before_.load();
      for (size_t i = 0; i < saved_.size(); ++i) saved_[i] = other.saved_[i].load();
      return *this;
    }

    const sharding::SwapExtent& of() const { return of_; }
    int64_t offset() const { return of_.place.offset; }
    int64_t bytes() const { return of_.bytes; }
    // Whether `checksum` is the known one.
    bool Agrees(uint64_t checksum) const { return Agrees(checksum_, checksum); }
    // Otherwise the sum from before, as an update sums bytes that it still has to write; or the sum
    // from before a save. In this order, as each comes from the one before it.
    bool AgreesOrDid(uint64_t checksum) const {
      return Agrees(checksum_, checksum) || Agrees(before_, checksum) ||
             Agrees(saved_[0], checksum) || Agrees(saved_[1], checksum);
    }
    void Set(uint64_t checksum) {
      before_.store(checksum_.load(std::memory_order_relaxed), std::memory_order_release);
      checksum_.store(Known(checksum), std::memory_order_release);
    }
    // An update leaves the present bytes to a save and writes elsewhere: it has set its sum, or has
    // changed nothing because the step was skipped.
    void LeaveToSave() {
      saved_[0].store(before_.load(std::memory_order_relaxed), std::memory_order_release);
      saved_[1].store(checksum_.load(std::memory_order_relaxed), std::memory_order_release);
    }
    void Forget() { checksum_.store(kUnknown, std::memory_order_relaxed); }
    bool is_known() const { return checksum_.load(std::memory_order_relaxed) != kUnknown; }

   private:
    static constexpr uint64_t kUnknown = 0, kNone = 1;
    static uint64_t Known(uint64_t checksum) { return std::max(checksum, uint64_t{2}); }
    static bool Agrees(const std::atomic<uint64_t>& sum, uint64_t checksum) {
      const uint64_t known = sum.load(std::memory_order_acquire);
      return known == kUnknown || known == Known(checksum);
    }

    sharding::SwapExtent of_;
    std::atomic<uint64_t> checksum_{kUnknown}, before_{kNone};
    std::array<std::atomic<uint64_t>, 2> saved_{kNone, kNone};
  };

  // Checksums of new files: zeros, which the optimizer's states begin with.
  SwapChecksums(const sharding::SwapFiles& files, VerifySwap verify);
  // Takes over sums of files that these follow: parameters, masters and states in the same places.
  void KeepOf(SwapChecksums& before);
  // Forgets sums that only "all" has; the others stay.
  void KeepStatesOnly();

  // All extents that overlap `bytes` from `place` on; none if that is not verified.
  std::span<Extent> In(const sharding::Place& place, int64_t bytes);
  void Forget(const sharding::Place& place, int64_t bytes) {
    for (Extent& extent : In(place, bytes)) extent.Forget();
  }

 private:
  std::vector<Extent> states_, parameters_;  // of either file, by offset
};

}  // namespace ebb
