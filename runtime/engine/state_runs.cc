// One rank's slice of an array of state as runs of memory, wherever it lives: in place on the device
// and in host memory, through bounce memory in the swap file.
#include <algorithm>
#include <memory>
#include <vector>

#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "ebb/optim/split_master.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

using sharding::Place;

namespace {

constexpr int64_t kRunElements = int64_t{1} << 18;
constexpr int64_t kBlock = ShardFile::kAlignment;

}  // namespace

// `bytes` from `place` on. Pieces of an extent that begin and end at whole blocks, or end with the
// extent, are written without being read before.
absl::Status Executor::VisitPlace(const Place& place, int64_t bytes, Access access,
                                  absl::FunctionRef<absl::Status(std::byte*)> visit) {
  if (place.tier != Tier::kNvme)
    return VisitMemory(storage_->At(place), place.tier, bytes, access, visit);
  const int64_t begin = place.offset / kBlock * kBlock,
                end = (place.offset + bytes + kBlock - 1) / kBlock * kBlock;
  EBB_ASSIGN_OR_RETURN(const PinnedMemory bounce,
                       AllocatePinned(end - begin, /*pin=*/false, "a piece of the swap file"));
  ShardFile& file = storage_->File(place);
  IoTransfer transfer;
  if (access != Access::kWrite || place.offset != begin || place.offset + bytes != end) {
    file.StartRead(transfer, begin, bounce.buffer.data(), end - begin);
    EBB_RETURN_IF_ERROR(file.Wait(transfer));
  }
  EBB_RETURN_IF_ERROR(visit(bounce.buffer.data() + (place.offset - begin)));
  if (access == Access::kRead) return absl::OkStatus();
  swap_verifier_->NoteWrite(
      place, {bounce.buffer.data() + (place.offset - begin), static_cast<size_t>(bytes)});
  file.StartWrite(transfer, begin, bounce.buffer.data(), end - begin);
  absl::Status written = file.Wait(transfer);
  if (!written.ok()) swap_verifier_->Forget(place, bytes);
  return written;
}

// What lies on a device whose memory the host cannot reach is looked at, and changed, in a copy. That
// is memory which the device has not locked: a copy waits inside the driver for all that is before it
// on the stream, other ranks' collectives too, so it is enqueued when nothing is.
absl::Status Executor::VisitMemory(std::byte* at, Tier tier, int64_t bytes, Access access,
                                   absl::FunctionRef<absl::Status(std::byte*)> visit) {
  if (tier != Tier::kDevice || device_.kind() == DeviceKind::kCpu) return visit(at);
  const auto copy = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
  const auto move = [&](void* to, const void* from) {
    const std::lock_guard turn(host_access_);
    reduce_->WaitIdle();
    reduce_->Copy(to, from, bytes);
    reduce_->WaitIdle();
    return device_.status();
  };
  if (access != Access::kWrite) EBB_RETURN_IF_ERROR(move(copy.get(), at));
  EBB_RETURN_IF_ERROR(visit(copy.get()));
  return access == Access::kRead ? absl::OkStatus() : move(at, copy.get());
}

// For kernels, which reach the device's memory where it is.
absl::Status Executor::VisitGradient(int unit, Access access,
                                     absl::FunctionRef<void(std::byte*)> visit) {
  const Place shard = plan().pools.GradientShard(unit);
  const int64_t bytes = plan().layout.units[static_cast<size_t>(unit)].trainable.shard *
                        SizeOf(plan().decisions.shard_dtype(unit));
  if (shard.tier != Tier::kNvme) {
    visit(storage_->GradientSlice(unit));
    return absl::OkStatus();
  }
  return VisitPlace(shard, bytes, access, [&](std::byte* data) {
    if (access != Access::kWrite)
      swap_verifier_->VerifyRead(shard, {data, static_cast<size_t>(bytes)});
    visit(data);
    return absl::OkStatus();
  });
}

absl::Status Executor::VisitPieces(const StateArray& array, int64_t begin, int64_t end,
                                   Access access, StateVisitor visit) {
  const int64_t size = SizeOf(config_.compute);
  const std::vector<sharding::ParameterPiece>& pieces =
      plan().pools.homes.units[static_cast<size_t>(array.unit)].pieces(array.trainable);
  for (const sharding::ParameterPiece& piece : pieces) {
    const int64_t first = std::max(begin, piece.begin), last = std::min(end, piece.end);
    for (int64_t at = first; at < last; at += kRunElements) {
      const int64_t count = std::min(kRunElements, last - at);
      EBB_RETURN_IF_ERROR(
          VisitPlace(piece.home.Plus((at - piece.begin) * size), count * size, access,
                     [&](std::byte* data) { return visit(data, config_.compute, at, count); }));
    }
  }
  return absl::OkStatus();
}

// Elements [at, at + count) of this rank's slice: the low halves, of which the first is at `low`, and
// the parameters as the fp32 masters that they are.
absl::Status Executor::VisitSplit(const StateArray& array, const Place& low, int64_t at,
                                  int64_t count, Access access, StateVisitor visit) {
  std::vector<float> masters(static_cast<size_t>(count));
  auto* const fp32 = reinterpret_cast<std::byte*>(masters.data());
  const StateArray parameters{.what = StateClass::kParameter, .unit = array.unit};
  if (access == Access::kWrite) EBB_RETURN_IF_ERROR(visit(fp32, DType::kFloat32, at, count));
  EBB_RETURN_IF_ERROR(VisitPlace(low, count * 2, access, [&](std::byte* low_data) {
    return VisitPieces(parameters, at, at + count, access,
                       [&](std::byte* data, DType, int64_t first, int64_t length) -> absl::Status {
                         float* const master = masters.data() + (first - at);
                         auto* const half = reinterpret_cast<uint16_t*>(low_data) + (first - at);
                         auto* const parameter = reinterpret_cast<BFloat16*>(data);
                         if (access == Access::kRead) {
                           optim::Join(alone_, parameter, half, master, length);
                         } else {
                           optim::Split(alone_, master, parameter, half, length);
                         }
                         return absl::OkStatus();
                       });
  }));
  return access == Access::kRead ? visit(fp32, DType::kFloat32, at, count) : absl::OkStatus();
}

absl::Status Executor::VisitState(const StateArray& array, int64_t begin, int64_t end,
                                  Access access, StateVisitor visit) {
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::UnitHomes& unit = plan().pools.homes.units[static_cast<size_t>(array.unit)];
  if (array.what == StateClass::kParameter) return VisitPieces(array, begin, end, access, visit);
  if (array.what == StateClass::kGradient) {
    const DType dtype = decisions.shard_dtype(array.unit);
    const Place shard = plan().pools.GradientShard(array.unit);
    const int64_t offset = begin * SizeOf(dtype), bytes = (end - begin) * SizeOf(dtype);
    const auto run = [&](std::byte* data) { return visit(data, dtype, begin, end - begin); };
    if (shard.tier == Tier::kNvme) return VisitPlace(shard.Plus(offset), bytes, access, run);
    return VisitMemory(storage_->GradientSlice(array.unit) + offset, shard.tier, bytes, access,
                       run);
  }
  if (array.what == StateClass::kMaster && decisions.stochastic_rounding) {
    return VisitPieces({.what = StateClass::kParameter, .unit = array.unit}, begin, end, access,
                       visit);
  }
  // What a rank updates is whole at stage 0, and this its slice of it.
  const int64_t slice =
      decisions.stage == 0
          ? shard_ * plan().layout.units[static_cast<size_t>(array.unit)].trainable.shard
          : 0;
  for (int g = 0; g < unit.sub_groups; ++g) {
    const sharding::SubGroup& group =
        plan().pools.homes.sub_groups[static_cast<size_t>(unit.first_sub_group + g)];
    const int64_t first = std::max(begin + slice, group.begin),
                  last = std::min(end + slice, group.end);
    for (int64_t at = first; at < last; at += kRunElements) {
      const int64_t count = std::min(kRunElements, last - at);
      if (array.what == StateClass::kMaster && decisions.split_master) {
        EBB_RETURN_IF_ERROR(VisitSplit(array, group.master.Plus((at - group.begin) * 2), at - slice,
                                       count, access, visit));
        continue;
      }
      const Place place = array.what == StateClass::kMaster
                              ? group.master
                              : group.states.Plus(array.state * group.states_stride);
      EBB_RETURN_IF_ERROR(VisitPlace(
          place.Plus((at - group.begin) * 4), count * 4, access,
          [&](std::byte* data) { return visit(data, DType::kFloat32, at - slice, count); }));
    }
  }
  return absl::OkStatus();
}

}  // namespace ebb
