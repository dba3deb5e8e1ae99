#include "ebb/runtime/engine/swap_verifier.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/optim/checksum.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

using sharding::Place;
using Extent = SwapChecksums::Extent;

SwapVerifier::SwapVerifier(const sharding::Plan& plan, const ModelSpec& model, VerifySwap verify,
                           Storage& storage, StepErrors& errors)
    : plan_(plan),
      model_(model),
      verify_(verify),
      storage_(storage),
      errors_(errors),
      checksums_(plan, verify),
      scratch_(static_cast<size_t>(optim::UpdateChecksumScratch(checksums_.elements_max()))),
      of_states_(static_cast<size_t>(1 + plan.decisions.optimizer_states)) {}

void SwapVerifier::VerifyStatesOnly() {
  verify_ = VerifySwap::kStates;
  checksums_.KeepStatesOnly();
}

// Other ranks are told the beginning and the end (ExchangeRecord).
void SwapVerifier::FailAt(const Extent& extent, const Place& place) {
  errors_.Fail(absl::DataLossError(absl::StrCat(
      "the engine has failed: the ", std::string(Name(extent.what)), " of unit '",
      model_.units[static_cast<size_t>(extent.unit)].name,
      "' came back from the disk with other bytes than were written; reload the model. Another "
      "program has changed ",
      storage_.File(place).paths(), " at offset ", extent.offset, " to ",
      extent.offset + extent.bytes,
      ", or the disk returns wrong data (\"ebb.verify_swap\": \"off\" turns this check off)")));
}

bool SwapVerifier::FilesAreOurs() {
  const absl::Status changed = storage_.CheckFiles();
  if (changed.ok()) return true;
  errors_.Fail(absl::Status(changed.code(), absl::StrCat("the engine has failed: ",
                                                         changed.message(), "; reload the model")));
  return false;
}

bool SwapVerifier::Verifies(const sharding::SubGroup& group) const {
  return group.tier == Tier::kNvme && verify_ != VerifySwap::kOff;
}

Place SwapVerifier::HomeOf(const sharding::SubGroup& group, int array) const {
  return array == 0 ? group.master : group.states.Plus((array - 1) * group.states_stride);
}

bool SwapVerifier::AgreeStates(const sharding::SubGroup& group, std::span<const uint64_t> checksums,
                               std::optional<int> states) {
  const int last = states.value_or(plan_.decisions.optimizer_states);
  for (int array = first_array(); array <= last; ++array) {
    const Place home = HomeOf(group, array);
    const Extent& extent = checksums_.In(home, 1).front();
    if (extent.Agrees(checksums[static_cast<size_t>(array)])) continue;
    FailAt(extent, home);
    return false;
  }
  return true;
}

void SwapVerifier::SetStates(const sharding::SubGroup& group, std::span<const uint64_t> checksums) {
  const sharding::Decisions& decisions = plan_.decisions;
  for (int array = first_array(); array <= decisions.optimizer_states; ++array) {
    checksums_.In(HomeOf(group, array), 1).front().Set(checksums[static_cast<size_t>(array)]);
  }
}

std::span<const uint64_t> SwapVerifier::SumStates(const sharding::SubGroup& group,
                                                  const std::byte* master,
                                                  std::span<std::byte* const> states_at,
                                                  ThreadTeam& team, std::optional<int> states) {
  const sharding::Decisions& decisions = plan_.decisions;
  const int last = states.value_or(decisions.optimizer_states);
  for (int array = first_array(); array <= last; ++array) {
    const std::byte* const at = array == 0 ? master : states_at[static_cast<size_t>(array) - 1];
    const int64_t bytes = group.count() * (array == 0 ? decisions.master_size() : 4);
    of_states_[static_cast<size_t>(array)] =
        optim::Checksum(team, {at, static_cast<size_t>(bytes)}, scratch_);
  }
  return of_states_;
}

bool SwapVerifier::SumsWhenMoved(StateClass what) {
  return what != StateClass::kMaster && what != StateClass::kOptimizer;
}

void SwapVerifier::VerifyRead(const Place& place, std::span<const std::byte> data) {
  for (Extent& extent : checksums_.In(place, static_cast<int64_t>(data.size()))) {
    const uint64_t checksum = optim::Checksum(data.subspan(
        static_cast<size_t>(extent.offset - place.offset), static_cast<size_t>(extent.bytes)));
    if (!extent.Agrees(checksum)) return FailAt(extent, place);
    extent.Set(checksum);
  }
}

void SwapVerifier::VerifyMasters(int sub_group, const std::byte* masters) {
  if (verify_ != VerifySwap::kAll) return;
  const sharding::SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(sub_group)];
  VerifyRead(group.master,
             {masters, static_cast<size_t>(group.count() * plan_.decisions.master_size())});
}

void SwapVerifier::NoteWrite(const Place& place, std::span<const std::byte> data) {
  const auto bytes = static_cast<int64_t>(data.size());
  for (Extent& extent : checksums_.In(place, bytes)) {
    const int64_t at = extent.offset - place.offset;
    if (at < 0 || at + extent.bytes > bytes) {
      extent.Forget();
      continue;
    }
    extent.Set(
        optim::Checksum(data.subspan(static_cast<size_t>(at), static_cast<size_t>(extent.bytes))));
  }
}

absl::StatusOr<bool> SwapVerifier::VerifyFile(const Place& place, int64_t bytes, Reader read,
                                              bool beside_steps) {
  constexpr int64_t kRunBlocks = 16;
  for (const Extent& extent : checksums_.In(place, bytes)) {
    if (!extent.is_known()) continue;
    std::vector<uint64_t> blocks;
    for (int64_t at = 0; at < extent.bytes;) {
      const int64_t run = std::min(extent.bytes - at, kRunBlocks * optim::kChecksumBlock);
      Place from = place;
      from.offset = extent.offset + at;
      EBB_RETURN_IF_ERROR(read(from, run, [&](const std::byte* data) {
        for (int64_t i = 0; i < run; i += optim::kChecksumBlock) {
          blocks.push_back(optim::ChecksumOfBlock(
              {data + i, static_cast<size_t>(std::min(optim::kChecksumBlock, run - i))}));
        }
      }));
      at += run;
    }
    const uint64_t checksum = optim::ChecksumFromBlocks(blocks, extent.bytes);
    if (beside_steps ? extent.AgreesOrDid(checksum) : extent.Agrees(checksum)) continue;
    FailAt(extent, place);
    return false;
  }
  return true;
}

}  // namespace ebb
