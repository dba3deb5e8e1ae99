// What this rank's swap files hold, as checksums: so that what another program has changed, or a disk
// returns wrongly, ends the training instead of going on with it (ebb.verify_swap). With "states" only masters and
// states have some, and parameters that are masters or half of them.
//
// An extent (sharding/swap_files.h) is written in one go by a step, by several of them at once. What is written there
// in smaller pieces, from outside, makes it unknown until it is written, or but for masters and states
// read, as a whole. Extents may be looked at from several streams, in whichever order the plan has
// them.
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

// By class, of what lies in a rank's files.
using ClassBytes = std::array<int64_t, kStateClasses>;
// What has no checksum; with kOff that is all.
ClassBytes BytesWithoutChecksum(const sharding::SwapFiles& files, VerifySwap verify);
// For people: "gradients and activations", "" where nothing is left out.
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
    int64_t offset() const { return of_.home.offset; }
    int64_t bytes() const { return of_.bytes; }
    // Whether `checksum` is what is known to lie there.
    bool Agrees(uint64_t checksum) const { return Agrees(checksum_, checksum); }
    // Or what was known before that, as an update sums what it is still to write; or when it was left to a save. In
    // this order, as each comes from the one before it.
    bool AgreesOrDid(uint64_t checksum) const {
      return Agrees(checksum_, checksum) || Agrees(before_, checksum) ||
             Agrees(saved_[0], checksum) || Agrees(saved_[1], checksum);
    }
    void Set(uint64_t checksum) {
      before_.store(checksum_.load(std::memory_order_relaxed), std::memory_order_release);
      checksum_.store(Known(checksum), std::memory_order_release);
    }
    // What was there until now is left to a save, by an update that writes elsewhere: it has set its sum, or has changed
    // nothing as the step was skipped.
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

  // Of files as they are made: zeros, which the optimizer's states begin with.
  SwapChecksums(const sharding::SwapFiles& files, VerifySwap verify);
  // Of files that go on as others: what is known of parameters, masters and states, which lie where they did.
  void KeepOf(SwapChecksums& before);
  // What has a sum with "all" alone has none any more; what else is known stays so.
  void KeepStatesOnly();

  // All that overlap `bytes` from `place` on; none where that is not verified.
  std::span<Extent> In(const sharding::Place& place, int64_t bytes);
  void Forget(const sharding::Place& place, int64_t bytes) {
    for (Extent& extent : In(place, bytes)) extent.Forget();
  }

 private:
  std::vector<Extent> states_, parameters_;  // of either file, by offset
};

}  // namespace ebb
