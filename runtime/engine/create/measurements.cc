#include "ebb/runtime/engine/create/measurements.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/offload/overrides.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/optim/checksum.h"
#include "ebb/optim/update_constants.h"
#include "ebb/optim/update_runs.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/report/traffic.h"

namespace ebb {
namespace {

constexpr double kFastEnough = 0.8;
constexpr int kRepetitions = 3;  // the fastest counts; one more runs before them
constexpr double kMeasurementSecondsMax = 0.25;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// In place, of whole elements that every rank has the same number of.
absl::StatusOr<BucketTime> TimeGather(Communicator& communicator, Stream& stream,
                                      std::span<std::byte> memory, int64_t bytes) {
  const int64_t count = bytes / communicator.size();
  const CollectiveSpan span = {.send = memory.data() + communicator.rank() * count,
                               .receive = memory.data(),
                               .count = count};
  BucketTime time = {.bytes = bytes, .seconds = std::numeric_limits<double>::infinity()};
  for (int repetition = -1; repetition < kRepetitions; ++repetition) {
    const Clock::time_point start = Clock::now();
    EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    if (repetition >= 0) time.seconds = std::min(time.seconds, SecondsSince(start));
  }
  return time;
}

// Makes `number` the first rank's, on all ranks.
absl::Status TakeFirstRanks(Communicator& communicator, Stream& stream, std::span<std::byte> memory,
                            int64_t& number) {
  const CollectiveSpan span = {
      .send = memory.data(), .receive = memory.data(), .count = sizeof(number)};
  stream.Copy(memory.data(), &number, sizeof(number));
  EBB_RETURN_IF_ERROR(communicator.Broadcast(stream, {&span, 1}, DType::kInt8, /*root=*/0));
  stream.Copy(&number, memory.data(), sizeof(number));
  stream.WaitIdle();
  return communicator.status();
}

}  // namespace

int64_t SmallestFastBucket(std::span<const BucketTime> times) {
  const auto rate = [](const BucketTime& time) {
    return static_cast<double>(time.bytes) / std::max(time.seconds, 1e-9);
  };
  double best = 0;
  int64_t smallest = 0;
  for (const BucketTime& time : times) best = std::max(best, rate(time));
  for (const BucketTime& time : times) {
    if (rate(time) < kFastEnough * best) continue;
    if (smallest == 0 || time.bytes < smallest) smallest = time.bytes;
  }
  return smallest;
}

absl::StatusOr<int64_t> MeasureBucketBytes(Communicator& communicator, Stream& stream,
                                           std::span<std::byte> memory, int64_t& number) {
  if (communicator.size() == 1) return kBucketBytesMin;
  const Clock::time_point start = Clock::now();
  std::vector<BucketTime> times;
  for (int64_t bytes = kBucketBytesMin;; bytes *= 2) {
    EBB_ASSIGN_OR_RETURN(const BucketTime time, TimeGather(communicator, stream, memory, bytes));
    times.push_back(time);
    const bool last = bytes >= kBucketBytesMax || SecondsSince(start) >= kMeasurementSecondsMax;
    number = last ? SmallestFastBucket(times) : 0;
    EBB_RETURN_IF_ERROR(TakeFirstRanks(communicator, stream, memory, number));
    if (number > 0) return number;
  }
}

namespace {

constexpr int kPasses = 5;  // the fastest counts; one more runs before them
constexpr double kSecondsMax = 0.02;
constexpr int kEnqueued = 8;  // in a pass of the device, so that the host's wait is little of it

double SecondsOf(absl::FunctionRef<void()> pass) {
  double best = std::numeric_limits<double>::infinity();
  const Clock::time_point start = Clock::now();
  for (int i = -1; i < kPasses && (i < 1 || SecondsSince(start) < kSecondsMax); ++i) {
    const Clock::time_point began = Clock::now();
    pass();
    if (i >= 0) best = std::min(best, SecondsSince(began));
  }
  return std::max(best, 1e-9);
}

// Arrays of `count` elements, one behind the other.
class Layout {
 public:
  Layout(const UpdateShape& shape, int64_t count) : shape_(shape), count_(count) {
    states_ = static_cast<int>(optim::StateNames(shape.optimizer).size());
    if (shape.master == optim::MasterForm::kWhole) master_ = count * 4;
    if (shape.master == optim::MasterForm::kSplit) master_ = count * 2;
    // The sent one, which copies leave there, may be the larger.
    gradient_ = count * std::max(SizeOf(shape.gradient), SizeOf(shape.sent));
  }

  int64_t bytes() const { return ParameterAt() + count_ * SizeOf(shape_.parameter); }
  std::byte* GradientIn(std::byte* memory) const { return memory + GradientAt(); }
  std::byte* ParameterIn(std::byte* memory) const { return memory + ParameterAt(); }
  optim::UpdateArrays ArraysIn(std::byte* memory) const {
    optim::UpdateArrays arrays{.gradient = GradientIn(memory),
                               .gradient_dtype = shape_.gradient,
                               .parameter = ParameterIn(memory),
                               .parameter_dtype = shape_.parameter,
                               .count = count_};
    if (shape_.master == optim::MasterForm::kWhole)
      arrays.master = reinterpret_cast<float*>(memory);
    if (shape_.master == optim::MasterForm::kSplit)
      arrays.master_low = reinterpret_cast<uint16_t*>(memory);
    std::byte* state = memory + master_;
    for (int k = 0; k < states_; ++k) {
      const Encoding encoding = EncodingOf(k);
      arrays.states[k] = optim::PieceAt(state, encoding, count_);
      state += encoding.bytes(count_);
    }
    return arrays;
  }

 private:
  Encoding EncodingOf(int state) const {
    return shape_.states.empty() ? Encoding(DType::kFloat32) : shape_.states[state];
  }
  int64_t GradientAt() const {
    int64_t at = master_;
    for (int k = 0; k < states_; ++k) at += EncodingOf(k).bytes(count_);
    return at;
  }
  int64_t ParameterAt() const { return GradientAt() + gradient_; }

  const UpdateShape& shape_;
  const int64_t count_;
  int states_ = 0;
  int64_t master_ = 0, gradient_ = 0;
};

}  // namespace

absl::StatusOr<sharding::UpdateRates> MeasureUpdateRates(const Device& device,
                                                         optim::Kernels& on_device,
                                                         optim::Kernels& on_host,
                                                         const UpdateShape& shape,
                                                         UpdateScratch& scratch) {
  constexpr std::string_view kWhat = "measuring the rates of updates";
  // Whole cuts, as sub-groups are.
  const int64_t cuts = (std::min(shape.elements, kMeasuredElements) + sharding::kCutElements - 1) /
                       sharding::kCutElements;
  const int64_t count = std::max<int64_t>(1, cuts) * sharding::kCutElements;
  const Layout layout(shape, count);
  constexpr int64_t kConstantsBytes = sizeof(optim::UpdateConstants);
  EBB_ASSIGN_OR_RETURN(scratch.device, device.Allocate(layout.bytes() + kConstantsBytes, kWhat));
  // Allocated like the pools of training: a device with memory of its own locks it, and goes on if
  // it cannot. The pools report that later.
  const bool shares = HostReaches(device);
  EBB_ASSIGN_OR_RETURN(scratch.host,
                       AllocatePinned(layout.bytes(), shape.pins_host_memory && shares, kWhat));
  absl::StatusOr<LockedRange> locked = device.LockHostMemory(scratch.host.buffer.span(), kWhat);
  if (locked.ok()) scratch.locked = *std::move(locked);
  EBB_RETURN_IF_ERROR(device.status());
  EBB_ASSIGN_OR_RETURN(scratch.shared, device.AllocateShared(kConstantsBytes, kWhat));
  auto* const constants = reinterpret_cast<optim::UpdateConstants*>(scratch.shared.data());
  *constants = optim::UpdateConstantsOf(
      shape.optimizer, {.step = 2, .learning_rate = shape.optimizer.learning_rate});
  std::byte* const in_device = scratch.device.data();
  std::byte* const in_host = scratch.host.buffer.data();
  // Streams end before the memory goes.
  EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("ebb measure"));
  EBB_ASSIGN_OR_RETURN(Stream upload, device.NewStream("ebb measure up"));
  EBB_ASSIGN_OR_RETURN(Stream host, device.NewHostStream("ebb measure cpu"));

  std::byte* const device_constants = in_device + layout.bytes();
  stream.Copy(device_constants, constants, kConstantsBytes);
  stream.WaitIdle();
  const optim::UpdateArrays device_arrays = layout.ArraysIn(in_device);
  const double of_device = SecondsOf([&] {
    for (int i = 0; i < kEnqueued; ++i)
      on_device.Update(stream, shape.optimizer, device_arrays,
                       reinterpret_cast<const optim::UpdateConstants*>(device_constants));
    stream.WaitIdle();
  });
  const optim::UpdateArrays host_arrays = layout.ArraysIn(in_host);
  const double of_host = SecondsOf([&] {
    host.Enqueue([&] { on_host.Update(host, shape.optimizer, host_arrays, constants); });
    host.WaitIdle();
  });
  const double of_copies = SecondsOf([&] {
    for (int i = 0; i < kEnqueued; ++i) {
      stream.Copy(layout.GradientIn(in_host), layout.GradientIn(in_device),
                  count * SizeOf(shape.sent));
      if (shape.parameters_go_up) {
        upload.Copy(layout.ParameterIn(in_device), layout.ParameterIn(in_host),
                    count * SizeOf(shape.parameter));
      }
    }
    stream.WaitIdle();
    upload.WaitIdle();
  });
  EBB_RETURN_IF_ERROR(stream.status());
  EBB_RETURN_IF_ERROR(upload.status());
  EBB_RETURN_IF_ERROR(device.status());
  const auto elements = static_cast<double>(count);
  return sharding::UpdateRates{.device = kEnqueued * elements / of_device,
                               .host = elements / of_host,
                               .copies = kEnqueued * elements / of_copies};
}

namespace {

constexpr int kPieces = 4,
              kSumPasses = 3;  // and one before them, after which no space is unwritten
constexpr int64_t kPieceBytes = int64_t{4} << 20;

double NonzeroSecondsSince(Clock::time_point start) {
  return std::max(SecondsSince(start), 1e-9);
}

// `sum`: lowered to the cost that is measured here.
absl::StatusOr<double> MeasureFile(ShardFile& file, int64_t file_bytes, double& sum) {
  const int64_t blocks = file_bytes / ShardFile::kAlignment,
                pieces = std::clamp<int64_t>(blocks, 1, kPieces),
                piece = std::min(kPieceBytes, blocks / pieces * ShardFile::kAlignment);
  EBB_ASSIGN_OR_RETURN(const PinnedMemory memory,
                       AllocatePinned(pieces * piece, /*pin=*/false, "measuring the disk"));
  const std::span<std::byte> data = memory.buffer.span();
  std::vector<IoTransfer> transfers(static_cast<size_t>(pieces));
  const auto move = [&](bool writes) -> absl::StatusOr<double> {
    const Clock::time_point start = Clock::now();
    int64_t at = 0;
    for (IoTransfer& transfer : transfers) {
      if (writes) {
        file.StartWrite(transfer, at, data.data() + at, piece);
      } else {
        file.StartRead(transfer, at, data.data() + at, piece);
      }
      at += piece;
    }
    absl::Status first;
    for (IoTransfer& transfer : transfers) first.Update(file.Wait(transfer));
    EBB_RETURN_IF_ERROR(first);
    return NonzeroSecondsSince(start);
  };
  const auto bytes = static_cast<double>(pieces * piece);
  double fastest = 0, fastest_sum = 0;
  for (int pass = -1; pass < kSumPasses; ++pass) {
    EBB_ASSIGN_OR_RETURN(const double read, move(/*writes=*/false));
    const Clock::time_point start = Clock::now();
    // Part by part, as a step sums the bytes of one transfer.
    uint64_t sums = 0;
    for (int64_t at = 0; at < pieces * piece; at += piece)
      sums ^= optim::Checksum(data.subspan(static_cast<size_t>(at), static_cast<size_t>(piece)));
    const double summed =
        NonzeroSecondsSince(start) + (sums == 0 ? 1e-9 : 0);  // so that it is done
    EBB_ASSIGN_OR_RETURN(const double written, move(/*writes=*/true));
    if (pass < 0) continue;
    fastest = std::max(fastest, 2 * bytes / (read + written));
    fastest_sum = std::max(fastest_sum, bytes / summed);
  }
  sum = std::min(sum, fastest_sum);
  return GivenOverrides().disk_rate ? GivenOverrides().disk_rate() : fastest;
}

}  // namespace

ChecksumWork ChecksumWorkOf(const sharding::Plan& plan, const sharding::SwapFiles& files) {
  const sharding::ClassBytes all = BytesWithoutChecksum(files, VerifySwap::kOff),
                             left = BytesWithoutChecksum(files, VerifySwap::kStates);
  ChecksumWork work;
  double summed = 0;
  for (const TrafficRow& row : sharding::PredictTraffic(plan)) {
    if (row.tier != Tier::kNvme) continue;
    const auto c = static_cast<size_t>(row.state);
    const auto moved = static_cast<int64_t>(row.predicted_bytes);
    (row.state == StateClass::kParameter ? work.parameters : work.states) += moved;
    if (left[c] > 0)
      summed +=
          static_cast<double>(moved) * static_cast<double>(left[c]) / static_cast<double>(all[c]);
  }
  // The masters that the gather before an early update casts. They are summed before the update
  // sums them.
  for (const sharding::Op& op : plan.ops) {
    if (op.role != sharding::Role::kCastMasters) continue;
    for (const sharding::UpdateDetail& of : op.updates)
      summed +=
          static_cast<double>(files.sub_groups[static_cast<size_t>(of.sub_group)].front().bytes);
  }
  work.summed = static_cast<int64_t>(summed);
  return work;
}

absl::StatusOr<ChecksumRates> MeasureChecksumRates(const Storage& storage,
                                                   const sharding::Plan& plan) {
  ChecksumRates rates{.sum = std::numeric_limits<double>::infinity()};
  const auto measure = [&](StateClass pool, int64_t bytes, double& rate) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    ShardFile& file = storage.files().File({.tier = Tier::kNvme, .pool = pool});
    EBB_ASSIGN_OR_RETURN(rate, MeasureFile(file, bytes, rates.sum));
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(measure(StateClass::kParameter,
                              plan.table.bytes.Of(Tier::kNvme, StateClass::kParameter),
                              rates.parameters));
  EBB_RETURN_IF_ERROR(measure(StateClass::kOptimizer, plan.table.bytes.state_file(), rates.states));
  return rates;
}

double LongerAtMost(const ChecksumWork& work, const ChecksumRates& rates, int threads) {
  if (work.summed == 0) return 0;
  const double disk = std::max(static_cast<double>(work.parameters) / rates.parameters,
                               static_cast<double>(work.states) / rates.states);
  const double sums = static_cast<double>(work.summed) / rates.sum / std::max(threads, 1);
  return disk > 0 ? sums / disk : std::numeric_limits<double>::infinity();
}

}  // namespace ebb
