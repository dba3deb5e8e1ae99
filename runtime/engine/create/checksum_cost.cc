#include "ebb/runtime/engine/create/checksum_cost.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <span>
#include <vector>

#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/memory/swap_checksums.h"
#include "ebb/sharding/report/traffic.h"

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPieces = 4,
              kSumPasses = 3;  // and one before them, after which no space is unwritten
constexpr int64_t kPieceBytes = int64_t{4} << 20;

double NonzeroSecondsSince(Clock::time_point start) {
  return std::max(std::chrono::duration<double>(Clock::now() - start).count(), 1e-9);
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
  const double known = GetOffloadTestHooks().disk_rate;
  return known > 0 ? known : fastest;
}

}  // namespace

ChecksumWork ChecksumWorkOf(const sharding::Plan& plan, const sharding::SwapFiles& files) {
  const ClassBytes all = BytesWithoutChecksum(files, VerifySwap::kOff),
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
  for (const sharding::Operation& operation : plan.operations) {
    if (operation.kind != sharding::OperationKind::kCastMasters) continue;
    for (const sharding::UpdateDetail& of : operation.updates)
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
                              plan.pools.file_bytes[static_cast<int>(StateClass::kParameter)],
                              rates.parameters));
  EBB_RETURN_IF_ERROR(measure(StateClass::kOptimizer, plan.pools.state_file_bytes(), rates.states));
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
