// What a step pays for the checksums that "ebb.verify_swap" "all" has beside those of "states", by which
// "auto" chooses between the two.
//
// A step takes at least what the disk takes for the step's bytes. Where its threads wait for the disk,
// sums take their time from the wait; where they compute, a step gets longer by the sums' time, which
// the threads of the rank share. So, whatever kernels and updates take:
//
//   longer by at most   (seconds of the sums in one thread / threads) / seconds of the disk
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

// Bytes of a step of one rank.
struct ChecksumWork {
  int64_t summed = 0;                  // by all, and not by states
  int64_t parameters = 0, states = 0;  // to and from the file of either
};
ChecksumWork ChecksumWorkOf(const sharding::Plan& plan, const sharding::SwapFiles& files);

// Bytes a second.
struct ChecksumRates {
  double sum = 1;  // of one thread
  double parameters = 1,
         states = 1;  // of the file of either, read and written; 1 where there is none
};

// Blocks: reads up to 16 MiB of each file, sums them, and writes them back, a few times, of which the
// fastest counts.
absl::StatusOr<ChecksumRates> MeasureChecksumRates(const Storage& storage,
                                                   const sharding::Plan& plan);

// A share of the step. Where the files are on two disks, the slower one's time is the disk's; so it is
// where they are on one, which takes longer than that.
double LongerAtMost(const ChecksumWork& work, const ChecksumRates& rates, int threads);
// No more than this is no longer: the same step from the same disk differs by more.
inline constexpr double kNoLonger = 0.01;

}  // namespace ebb
