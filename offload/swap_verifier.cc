#include "ebb/offload/swap_verifier.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {

using sharding::Place;
using sharding::SwapExtent;
using sharding::SwapFiles;

namespace {

uint64_t ChecksumOfZeros(int64_t bytes) {
  static const std::vector<std::byte> zeros(optim::kChecksumBlock);
  std::vector<uint64_t> blocks(optim::ChecksumBlocks(bytes), optim::ChecksumOfBlock(zeros));
  if (const int64_t rest = bytes % optim::kChecksumBlock; rest > 0)
    blocks.back() = optim::ChecksumOfBlock(std::span(zeros).first(rest));
  return optim::ChecksumFromBlocks(blocks, bytes);
}

bool HasSum(VerifySwap verify, const SwapExtent& extent) {
  return verify == VerifySwap::kAll || (verify == VerifySwap::kStates && extent.is_state);
}

// The order of extents: all of the file of states, then those of the file of parameters.
std::pair<bool, int64_t> PositionOf(const Place& place, int64_t further = 0) {
  return {place.pool == StateClass::kParameter, place.offset + further};
}

}  // namespace

sharding::ClassBytes BytesWithoutChecksum(const SwapFiles& files, VerifySwap verify) {
  sharding::ClassBytes left = {};
  for (const SwapExtent& extent : files.extents)
    if (!HasSum(verify, extent)) left[static_cast<int>(extent.what)] += extent.bytes;
  return left;
}

std::string ClassesWithoutChecksum(const SwapFiles& files, VerifySwap verify) {
  const sharding::ClassBytes left = BytesWithoutChecksum(files, verify);
  const bool trained_have =
      verify == VerifySwap::kStates &&
      std::none_of(files.extents.begin(), files.extents.end(), [](const SwapExtent& extent) {
        return extent.what == StateClass::kParameter && extent.trainable && !extent.is_state;
      });
  std::vector<std::string> classes;
  for (const auto& [what, name] :
       {std::pair(StateClass::kParameter, trained_have ? "frozen parameters" : "parameters"),
        std::pair(StateClass::kMaster, "masters"),
        std::pair(StateClass::kOptimizer, "optimizer states"),
        std::pair(StateClass::kGradient, "gradients"),
        std::pair(StateClass::kActivation, "boundary activations")}) {
    if (left[static_cast<int>(what)] > 0) classes.push_back(name);
  }
  if (classes.size() < 2) return absl::StrJoin(classes, "");
  const std::string last = std::move(classes.back());
  classes.pop_back();
  return absl::StrCat(absl::StrJoin(classes, ", "), " and ", last);
}

class SwapVerifier::Extent {
 public:
  // In a new file: zeros, which the optimizer's states begin with.
  explicit Extent(const SwapExtent& of) : of_(of) {
    if (of.what == StateClass::kOptimizer) Set(ChecksumOfZeros(of.bytes));
  }
  void TakeSums(const Extent& other) {
    checksum_ = other.checksum_.load();
    before_ = other.before_.load();
    for (size_t i = 0; i < saved_.size(); ++i) saved_[i] = other.saved_[i].load();
  }

  const SwapExtent& of() const { return of_; }
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

  const SwapExtent of_;
  std::atomic<uint64_t> checksum_{kUnknown}, before_{kNone};
  std::array<std::atomic<uint64_t>, 2> saved_{kNone, kNone};
};

SwapVerifier::SwapVerifier(SwapFiles files, std::span<const UnitSpec> units, VerifySwap verify,
                           const SwapStorage& storage, std::function<void(absl::Status)> fail)
    : units_(units), verify_(verify), storage_(storage), fail_(std::move(fail)) {
  FollowPlan(std::move(files));
  scratch_.resize(optim::UpdateChecksumScratch(files_.sub_group_elements_max));
}

SwapVerifier::~SwapVerifier() = default;

void SwapVerifier::VerifyStatesOnly() {
  verify_ = VerifySwap::kStates;
  FollowPlan(std::move(files_));
}

void SwapVerifier::FollowPlan(SwapFiles files) {
  files_ = std::move(files);
  std::vector<SwapExtent> with_sum;
  for (const SwapExtent& extent : files_.extents)
    if (HasSum(verify_, extent)) with_sum.push_back(extent);
  std::sort(with_sum.begin(), with_sum.end(), [](const SwapExtent& a, const SwapExtent& b) {
    return PositionOf(a.place) < PositionOf(b.place);
  });
  std::vector<Extent> extents(with_sum.begin(), with_sum.end());
  for (Extent& extent : extents) {
    const SwapExtent& of = extent.of();
    if (of.what == StateClass::kGradient || of.what == StateClass::kActivation) continue;
    for (const Extent& known : In(of.place, of.bytes)) extent.TakeSums(known);
  }
  extents_ = std::move(extents);
}

std::span<SwapVerifier::Extent> SwapVerifier::In(const Place& place, int64_t bytes) {
  const auto first = std::partition_point(extents_.begin(), extents_.end(), [&](const Extent& e) {
    return PositionOf(e.of().place, e.bytes()) <= PositionOf(place);
  });
  const auto last = std::partition_point(first, extents_.end(), [&](const Extent& e) {
    return PositionOf(e.of().place) < PositionOf(place, bytes);
  });
  return {first, last};
}

// Other ranks get its beginning and its end (ExchangeRecord).
void SwapVerifier::FailAt(const Extent& extent, const Place& place) {
  fail_(absl::DataLossError(absl::StrCat(
      "the engine has failed: the ", std::string(Name(extent.of().what)), " of unit '",
      units_[extent.of().unit].name,
      "' came back from the disk with other bytes than were written; reload the model. The disk "
      "returns wrong data, in ",
      storage_.File(place).paths(), " at offset ", extent.offset(), " to ",
      extent.offset() + extent.bytes(), " (\"ebb.verify_swap\": \"off\" turns this check off)")));
}

bool SwapVerifier::Verifies(int sub_group) const {
  return verify_ != VerifySwap::kOff && !ArraysOf(sub_group).empty();
}

bool SwapVerifier::AgreeStates(int sub_group, int first, std::span<const uint64_t> checksums) {
  const std::span<const SwapFiles::Array> arrays = ArraysOf(sub_group).subspan(first);
  for (size_t k = 0; k < checksums.size(); ++k) {
    if (arrays[k].bytes == 0) continue;
    const Extent& extent = In(arrays[k].place, 1).front();
    if (extent.Agrees(checksums[k])) continue;
    FailAt(extent, arrays[k].place);
    return false;
  }
  return true;
}

void SwapVerifier::SetStates(int sub_group, int first, std::span<const uint64_t> checksums) {
  const std::span<const SwapFiles::Array> arrays = ArraysOf(sub_group).subspan(first);
  for (size_t k = 0; k < checksums.size(); ++k)
    if (arrays[k].bytes > 0) In(arrays[k].place, 1).front().Set(checksums[k]);
}

std::span<const uint64_t> SwapVerifier::SumStates(int sub_group, int first,
                                                  std::span<std::byte* const> arrays,
                                                  ThreadTeam& team) {
  const std::span<const SwapFiles::Array> all = ArraysOf(sub_group).subspan(first);
  of_arrays_.assign(arrays.size(), 0);
  for (size_t k = 0; k < arrays.size(); ++k) {
    if (all[k].bytes > 0)
      of_arrays_[k] =
          optim::Checksum(team, {arrays[k], static_cast<size_t>(all[k].bytes)}, scratch_);
  }
  return of_arrays_;
}

bool SwapVerifier::SumsWhenMoved(StateClass what) {
  return what != StateClass::kMaster && what != StateClass::kOptimizer;
}

void SwapVerifier::VerifyRead(const Place& place, std::span<const std::byte> data) {
  for (Extent& extent : In(place, std::ssize(data))) {
    const uint64_t checksum =
        optim::Checksum(data.subspan(extent.offset() - place.offset, extent.bytes()));
    if (!extent.Agrees(checksum)) return FailAt(extent, place);
    extent.Set(checksum);
  }
}

void SwapVerifier::VerifyMasters(int sub_group, const std::byte* masters) {
  if (verify_ != VerifySwap::kAll) return;
  const SwapFiles::Array& of = ArraysOf(sub_group).front();
  VerifyRead(of.place, {masters, static_cast<size_t>(of.bytes)});
}

void SwapVerifier::NoteWrite(const Place& place, std::span<const std::byte> data) {
  for (Extent& extent : In(place, std::ssize(data))) {
    const int64_t at = extent.offset() - place.offset;
    if (at < 0 || at + extent.bytes() > std::ssize(data)) {
      extent.Forget();
      continue;
    }
    extent.Set(optim::Checksum(data.subspan(at, extent.bytes())));
  }
}

void SwapVerifier::Forget(const Place& place, int64_t bytes) {
  for (Extent& extent : In(place, bytes)) extent.Forget();
}

void SwapVerifier::NoteMove(const Place& place) {
  for (Extent& extent : In(place, 1)) extent.LeaveToSave();
}

bool SwapVerifier::VerifyPiece(Pieces& pieces, const Place& place,
                               std::span<const std::byte> data) {
  const int64_t end = place.offset + std::ssize(data);
  if (pieces.next != place) pieces.from_start = false;
  for (const Extent& extent : In(place, std::ssize(data))) {
    if (!extent.is_known()) continue;
    const int64_t from = std::max(extent.offset(), place.offset),
                  of_extent = extent.offset() + extent.bytes(), to = std::min(of_extent, end);
    if (from == extent.offset()) {
      pieces.sum = {};
      pieces.from_start = true;
    }
    pieces.sum.Append(data.subspan(from - place.offset, to - from));
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
  constexpr int64_t kRun = 16 * optim::kChecksumBlock;
  for (const Extent& extent : In(place, bytes)) {
    if (!extent.is_known()) continue;
    optim::RunningChecksum sum;
    for (int64_t at = 0; at < extent.bytes(); at += kRun) {
      const int64_t run = std::min(extent.bytes() - at, kRun);
      Place from = place;
      from.offset = extent.offset() + at;
      EBB_RETURN_IF_ERROR(read(from, run, [&](const std::byte* data) {
        sum.Append({data, static_cast<size_t>(run)});
      }));
    }
    if (extent.Agrees(sum.Take())) continue;
    FailAt(extent, place);
    return false;
  }
  return true;
}

}  // namespace ebb
