// One parameter's state from the slices of all ranks.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

using sharding::SliceOf;

constexpr int64_t kPieceElements = int64_t{1} << 18;

// The elements of a run that `values` have go to their place in `piece`. `begin`: their first element in the
// block; `first`: the piece's in the whole.
void TakeRun(const BlockRun& run, int64_t begin, std::span<const float> values, int64_t first,
             std::span<float> piece) {
  const int64_t from = std::max(begin, run.local),
                to = std::min(begin + std::ssize(values), run.local + run.count);
  if (from < to)
    std::copy_n(values.begin() + (from - begin), to - from,
                piece.begin() + (run.whole + from - run.local - first));
}

}  // namespace

absl::Status StateAccess::Gather(ParameterId p, What what, float scale, int root, Sink sink) {
  EBB_ASSIGN_OR_RETURN(const Found own, Find(p, what));
  absl::Status read = core_.errors.Report();  // of the update that was waited for, on this rank
  if (read.ok() && own.begin != own.end) read = values_.Verify(own.Range(own.begin, own.end));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(lane_, read));
  Gathering gathering{.parameter = p, .own = own, .scale = scale, .root = root, .read = read};
  EBB_RETURN_IF_ERROR(model()[p].block ? GatherBlocks(gathering, sink)
                                       : GatherWhole(gathering, sink));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(lane_, gathering.read));
  return gathering.taken;
}

// Elements [begin, end) of what the rank `from` has: there read, then passed on.
absl::Status StateAccess::PassPiece(Gathering& of, int from, int64_t begin, int64_t end) {
  const bool sends = core_.inputs.of_calls().rank() == from;
  of.values.resize(static_cast<size_t>(end - begin));
  // A piece that cannot be read is passed on all the same: the others wait for it.
  if (sends && of.read.ok()) of.read = ReadFrom(of.own, begin, of.values);
  if (sends && of.scale != 1)
    for (float& value : of.values) value *= of.scale;
  return sends && of.root == from ? absl::OkStatus() : Pass(of.values, from, of.root);
}

// States in blocks are read from the beginning of a block on.
absl::Status StateAccess::ReadFrom(const Found& own, int64_t begin, std::span<float> values) {
  const int unit = own.array.unit;
  const int64_t block = own.array.what == StateClass::kOptimizer
                            ? plan().decisions.state_encoding(unit, own.array.state).block
                            : 0;
  const int64_t before = block == 0 ? 0 : (begin - own.begin) % block;
  const int64_t end = begin + std::ssize(values);
  if (before == 0) return values_.Read(own.Range(begin, end), values);
  std::vector<float> longer(values.size() + static_cast<size_t>(before));
  EBB_RETURN_IF_ERROR(values_.Read(own.Range(begin - before, end), longer));
  std::copy(longer.begin() + before, longer.end(), values.begin());
  return absl::OkStatus();
}

// The first shard group has it all, and the first tensor rank of it.
absl::Status StateAccess::GatherWhole(Gathering& of, Sink sink) {
  const sharding::Section& section =
      sharding::SectionOf(plan(), of.own.array.unit, of.own.array.trainable);
  const int me = core_.inputs.of_calls().rank();
  for (int r = 0; r < plan().decisions.shards; ++r) {
    const int from = core_.inputs.CallRank(r, /*tensor=*/0);
    if (me != from && !of.Receives(me)) continue;
    for (const sharding::Interval& interval : sharding::IntervalsOf(section, r)) {
      if (interval.parameter != of.parameter) continue;
      for (int64_t begin = interval.begin; begin < interval.end; begin += kPieceElements) {
        const int64_t end = std::min(interval.end, begin + kPieceElements);
        EBB_RETURN_IF_ERROR(PassPiece(of, from, begin, end));
        if (of.Receives(me) && of.taken.ok())
          of.taken = sink(SliceOf(model(), of.parameter, begin, end), of.values);
      }
    }
  }
  return absl::OkStatus();
}

// Each piece of the whole from the ranks that have runs of it. What one tensor rank has of a piece
// lies together in its block.
absl::Status StateAccess::GatherBlocks(Gathering& of, Sink sink) {
  const ParameterSpec& parameter = model()[of.parameter];
  const Block& block = *parameter.block;
  const sharding::Section& section =
      sharding::SectionOf(plan(), of.own.array.unit, of.own.array.trainable);
  const int me = core_.inputs.of_calls().rank();
  const int64_t elements = Elements(block.whole_shape);
  std::vector<float> piece;
  for (int64_t first = 0; first < elements; first += kPieceElements) {
    const int64_t last = std::min(elements, first + kPieceElements);
    piece.resize(static_cast<size_t>(last - first));
    const std::vector<RunOfRank> runs =
        RunsOfWhole(block.whole_shape, *parameter.split, block.ranks, first, last);
    for (int tensor = 0; tensor < block.ranks; ++tensor) {
      int64_t low = INT64_MAX, high = 0;  // of the block
      for (const auto& [rank, run] : runs) {
        if (rank != tensor) continue;
        low = std::min(low, run.local);
        high = std::max(high, run.local + run.count);
      }
      for (int r = 0; r < plan().decisions.shards && low < high; ++r) {
        const int from = core_.inputs.CallRank(r, tensor);
        if (me != from && !of.Receives(me)) continue;
        for (const sharding::Interval& interval : sharding::IntervalsOf(section, r)) {
          const int64_t begin = std::max(low, interval.begin), end = std::min(high, interval.end);
          if (interval.parameter != of.parameter || begin >= end) continue;
          EBB_RETURN_IF_ERROR(PassPiece(of, from, begin, end));
          for (const auto& [rank, run] : runs)
            if (rank == tensor) TakeRun(run, begin, of.values, first, piece);
        }
      }
    }
    const Slice slice = {of.parameter, parameter.name, block.whole_shape, first, last};
    if (of.Receives(me) && of.taken.ok()) of.taken = sink(slice, piece);
  }
  return absl::OkStatus();
}

// Called by ranks that send or receive. `to`: -1: all.
absl::Status StateAccess::Pass(std::span<float> values, int from, int to) {
  const auto& [control, stream, mirror, world] = lane_;
  const int me = core_.inputs.of_calls().rank();
  const bool sends = me == from, receives = to < 0 || to == me;
  auto* const host = reinterpret_cast<std::byte*>(values.data());
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  const int64_t piece = mirror.Fitting(bytes, /*others=*/0);
  for (int64_t begin = 0; begin < bytes; begin += piece) {
    const int64_t length = std::min(piece, bytes - begin);
    std::byte* const data = mirror.Of(host + begin, 0);
    const CollectiveSpan span{
        .send = data, .receive = data, .count = length / int64_t{sizeof(float)}};
    if (sends) mirror.Upload(stream, host + begin, 0, length);
    EBB_RETURN_IF_ERROR(to < 0  ? control.Broadcast(stream, {&span, 1}, DType::kFloat32, from)
                        : sends ? control.Send(stream, {&span, 1}, DType::kFloat32, to)
                                : control.Receive(stream, {&span, 1}, DType::kFloat32, from));
    if (receives) mirror.Download(stream, 0, length);
    stream.WaitIdle();
    if (receives) mirror.Take(host + begin, 0, length);
  }
  return absl::OkStatus();
}

}  // namespace ebb
