#include "ebb/runtime/engine/memory/swap_verifier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/checksum.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {

using sharding::Place;
using Extent = SwapChecksums::Extent;

SwapVerifier::SwapVerifier(sharding::SwapFiles files, std::span<const UnitSpec> units,
                           VerifySwap verify, Storage& storage, StepErrors& errors)
    : files_(std::move(files)),
      units_(units),
      verify_(verify),
      storage_(storage),
      errors_(errors),
      checksums_(files_, verify),
      scratch_(static_cast<size_t>(optim::UpdateChecksumScratch(files_.sub_group_elements_max))) {}

void SwapVerifier::FollowPlan(sharding::SwapFiles files) {
  files_ = std::move(files);
  SwapChecksums made(files_, verify_);
  made.KeepOf(checksums_);
  checksums_ = std::move(made);
}

void SwapVerifier::VerifyStatesOnly() {
  verify_ = VerifySwap::kStates;
  checksums_.KeepStatesOnly();
}

// Other ranks get its beginning and its end (ExchangeRecord).
void SwapVerifier::FailAt(const Extent& extent, const Place& place) {
  errors_.Fail(absl::DataLossError(absl::StrCat(
      "the engine has failed: the ", std::string(Name(extent.of().what)), " of unit '",
      units_[static_cast<size_t>(extent.of().unit)].name,
      "' came back from the disk with other bytes than were written; reload the model. The disk "
      "returns wrong data, in ",
      storage_.files().File(place).paths(), " at offset ", extent.offset(), " to ",
      extent.offset() + extent.bytes(), " (\"ebb.verify_swap\": \"off\" turns this check off)")));
}

bool SwapVerifier::Verifies(int sub_group) const {
  return verify_ != VerifySwap::kOff && !ArraysOf(sub_group).empty();
}

bool SwapVerifier::AgreeStates(int sub_group, std::span<const uint64_t> checksums, int states) {
  const std::span<const sharding::SwapFiles::Array> arrays = ArraysOf(sub_group);
  for (size_t k = 0; k <= static_cast<size_t>(states); ++k) {
    if (arrays[k].bytes == 0) continue;
    const Extent& extent = checksums_.In(arrays[k].place, 1).front();
    if (extent.Agrees(checksums[k])) continue;
    FailAt(extent, arrays[k].place);
    return false;
  }
  return true;
}

void SwapVerifier::SetStates(int sub_group, std::span<const uint64_t> checksums) {
  const std::span<const sharding::SwapFiles::Array> arrays = ArraysOf(sub_group);
  for (size_t k = 0; k < arrays.size(); ++k)
    if (arrays[k].bytes > 0) checksums_.In(arrays[k].place, 1).front().Set(checksums[k]);
}

std::span<const uint64_t> SwapVerifier::SumStates(int sub_group, const std::byte* master,
                                                  std::span<std::byte* const> states,
                                                  ThreadTeam& team) {
  const std::span<const sharding::SwapFiles::Array> arrays = ArraysOf(sub_group);
  of_arrays_.assign(arrays.size(), 0);
  for (size_t k = 0; k <= states.size(); ++k) {
    const std::byte* const at = k == 0 ? master : states[k - 1];
    if (arrays[k].bytes > 0)
      of_arrays_[k] = optim::Checksum(team, {at, static_cast<size_t>(arrays[k].bytes)}, scratch_);
  }
  return of_arrays_;
}

bool SwapVerifier::SumsWhenMoved(StateClass what) {
  return what != StateClass::kMaster && what != StateClass::kOptimizer;
}

void SwapVerifier::VerifyRead(const Place& place, std::span<const std::byte> data) {
  for (Extent& extent : checksums_.In(place, static_cast<int64_t>(data.size()))) {
    const uint64_t checksum = optim::Checksum(data.subspan(
        static_cast<size_t>(extent.offset() - place.offset), static_cast<size_t>(extent.bytes())));
    if (!extent.Agrees(checksum)) return FailAt(extent, place);
    extent.Set(checksum);
  }
}

void SwapVerifier::VerifyMasters(int sub_group, const std::byte* masters) {
  if (verify_ != VerifySwap::kAll) return;
  const sharding::SwapFiles::Array& of = ArraysOf(sub_group).front();
  VerifyRead(of.place, {masters, static_cast<size_t>(of.bytes)});
}

void SwapVerifier::NoteWrite(const Place& place, std::span<const std::byte> data) {
  const auto bytes = static_cast<int64_t>(data.size());
  for (Extent& extent : checksums_.In(place, bytes)) {
    const int64_t at = extent.offset() - place.offset;
    if (at < 0 || at + extent.bytes() > bytes) {
      extent.Forget();
      continue;
    }
    extent.Set(optim::Checksum(
        data.subspan(static_cast<size_t>(at), static_cast<size_t>(extent.bytes()))));
  }
}

void SwapVerifier::NoteMove(const Place& place) {
  for (Extent& extent : checksums_.In(place, 1)) extent.LeaveToSave();
}

bool SwapVerifier::VerifyPiece(Pieces& pieces, const Place& place,
                               std::span<const std::byte> data) {
  const int64_t end = place.offset + std::ssize(data);
  if (pieces.next != place) pieces.from_start = false;
  for (const Extent& extent : checksums_.In(place, std::ssize(data))) {
    if (!extent.is_known()) continue;
    const int64_t from = std::max(extent.offset(), place.offset),
                  of_extent = extent.offset() + extent.bytes(), to = std::min(of_extent, end);
    if (from == extent.offset()) {
      pieces.sum = {};
      pieces.from_start = true;
    }
    pieces.sum.Append(
        data.subspan(static_cast<size_t>(from - place.offset), static_cast<size_t>(to - from)));
    if (to < of_extent) continue;
    if (std::exchange(pieces.from_start, false) && !extent.AgreesOrDid(pieces.sum.Take())) {
      FailAt(extent, place);
      return false;
    }
  }
  pieces.next = place.Plus(std::ssize(data));
  return true;
}

absl::StatusOr<bool> SwapVerifier::VerifyFile(const Place& place, int64_t bytes, Reader read) {
  constexpr int64_t kRunBlocks = 16;
  for (const Extent& extent : checksums_.In(place, bytes)) {
    if (!extent.is_known()) continue;
    std::vector<uint64_t> blocks;
    for (int64_t at = 0; at < extent.bytes();) {
      const int64_t run = std::min(extent.bytes() - at, kRunBlocks * optim::kChecksumBlock);
      Place from = place;
      from.offset = extent.offset() + at;
      EBB_RETURN_IF_ERROR(read(from, run, [&](const std::byte* data) {
        for (int64_t i = 0; i < run; i += optim::kChecksumBlock) {
          blocks.push_back(optim::ChecksumOfBlock(
              {data + i, static_cast<size_t>(std::min(optim::kChecksumBlock, run - i))}));
        }
      }));
      at += run;
    }
    if (extent.Agrees(optim::ChecksumFromBlocks(blocks, extent.bytes()))) continue;
    FailAt(extent, place);
    return false;
  }
  return true;
}

}  // namespace ebb
