// The cost of the checksums that "ebb.verify_swap" "all" adds to "states". "auto" chooses between
// the two by this.
//
// A step takes at least the disk's time for its bytes. Where the step's threads wait for the disk,
// checksums take their time from the wait. Where they compute, the step gets longer by the
// checksums' time, shared by the rank's threads. So, whatever kernels and updates take:
//
//   longer by at most   (seconds of the sums in one thread / threads) / seconds of the disk
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

// Bytes of a step of one rank.
struct ChecksumWork {
  int64_t summed = 0;                  // with "all", beyond those of "states"
  int64_t parameters = 0, states = 0;  // moved to and from either file
};
ChecksumWork ChecksumWorkOf(const sharding::Plan& plan, const sharding::SwapFiles& files);

// Bytes a second.
struct ChecksumRates {
  double sum = 1;  // of one thread
  double parameters = 1,
         states = 1;  // of either file, reads and writes together; 1 if there is none
};

// Blocks: a few times, reads up to 16 MiB of each file, sums them and writes them back. The fastest
// time counts.
absl::StatusOr<ChecksumRates> MeasureChecksumRates(const Storage& storage,
                                                   const sharding::Plan& plan);

// A share of the step. With the files on two disks the slower one's time counts. The same is
// computed for files on one disk, which takes longer than that.
double LongerAtMost(const ChecksumWork& work, const ChecksumRates& rates, int threads);
// Up to this a step counts as no longer: its time on the same disk varies by more.
inline constexpr double kNoLonger = 0.01;

}  // namespace ebb
