// The times from which Create derives values that the config leaves open: of all-gathers, updates
// and checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/sharding/fit/offload_ratio.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {

// How many bytes a group of collectives needs to keep the links between ranks busy. Systems differ
// a lot, so this is measured once, by timing a few all-gathers. Sizes double from the least to the
// most.
inline constexpr int64_t kBucketBytesMin = int64_t{256} << 10, kBucketBytesMax = int64_t{64} << 20;

struct BucketTime {
  int64_t bytes = 0;  // gathered
  double seconds = 0;
};

// The smallest size with at least 80% of the best rate, in bytes a second; 0 if there are no times.
int64_t SmallestFastBucket(std::span<const BucketTime> times);

// Measures all-gathers on `stream`; returns that size in bytes of the gathered whole. Collective,
// blocks. The first rank's clock decides, also when to stop, after about a quarter of a second.
// `memory`: of the device, kBucketBytesMax on every rank; its contents are lost. `number`: shared
// by host and device. A rank alone gets kBucketBytesMin.
absl::StatusOr<int64_t> MeasureBucketBytes(Communicator& communicator, Stream& stream,
                                           std::span<std::byte> memory, int64_t& number);

// How fast a rank updates: the optimizer on the device, the same on the processor, and the copies
// for updates below the device. Measured by running each a few times over scratch memory like the
// rank's state. The arrays are as in optim::UpdateArrays.
struct UpdateShape {
  OptimizerConfig optimizer = {};
  int64_t elements = 0;  // of the rank; kMeasuredElements of them are timed
  optim::MasterForm master = optim::MasterForm::kWhole;
  std::vector<Encoding> states = {};  // by state; empty: all are fp32
  DType gradient = DType::kFloat32, parameter = DType::kFloat32;
  DType sent = DType::kFloat32;  // dtype of gradients on their way to the host
  bool parameters_go_up = true;
  bool pins_host_memory = true;  // on the CPU; a GPU locks it always
};

// More than most caches hold, like the states of a model.
inline constexpr int64_t kMeasuredElements = int64_t{1} << 22;

// Memory to measure in. Freeing it may wait for the device.
struct UpdateScratch {
  Buffer device, shared;
  PinnedMemory host;
  LockedRange locked;  // goes before the memory that it locks
};

// Blocks: repeats each for 20 ms or so, at least twice. Takes up to 80 MiB of the device and of the
// host in `scratch`, also on an error. Kernels of the device's streams, and of the host's.
absl::StatusOr<sharding::UpdateRates> MeasureUpdateRates(const Device& device,
                                                         optim::Kernels& on_device,
                                                         optim::Kernels& on_host,
                                                         const UpdateShape& shape,
                                                         UpdateScratch& scratch);

// The cost of the checksums that "ebb.verify_swap" "all" adds to "states". "auto" chooses between
// the two by this.
//
// A step takes at least the disk's time for its bytes. Where the step's threads wait for the disk,
// checksums take their time from the wait. Where they compute, the step gets longer by the
// checksums' time, shared by the rank's threads. So, whatever kernels and updates take:
//
//   longer by at most   (seconds of the sums in one thread / threads) / seconds of the disk
struct ChecksumWork {                  // bytes of a step of one rank
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
