#include "ebb/offload/swap_storage.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/offload/overrides.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/requests_in_flight.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {
namespace {

constexpr uint64_t kInSecond = uint64_t{1} << 32;

// The run's need on the disks of a host, where one file finds no room: by class, and over the
// ranks.
std::string NeedOnNvme(const sharding::Plan& plan, const Config& config, int ranks) {
  using sharding::SizeText;
  const std::vector<std::string>&parameter_paths = config.zero.offload_param.nvme_paths,
        &state_paths = config.zero.offload_optimizer.nvme_paths;
  std::vector<std::string> classes;
  int64_t of_parameters = 0, of_states = 0;
  for (int state = 0; state < kStateClasses; ++state) {
    const StateClass named = static_cast<StateClass>(state);
    const int64_t bytes = plan.table.bytes.Of(Tier::kNvme, named);
    if (bytes == 0) continue;
    (named == StateClass::kParameter ? of_parameters : of_states) += bytes;
    classes.push_back(absl::StrCat(std::string(Name(named)), " ", SizeText(bytes)));
  }
  const int64_t all = of_parameters + of_states;
  std::string need = absl::StrCat("this rank needs ", SizeText(all),
                                  " on NVMe in all: ", absl::StrJoin(classes, ", "));
  if (ranks > 1) {
    absl::StrAppend(&need, "; every rank of this host needs as much, ", ranks, " of them ",
                    SizeText(ranks * all));
  }
  if (of_parameters > 0 && of_states > 0 && parameter_paths != state_paths) {
    const auto in = [](const std::vector<std::string>& paths) {
      return absl::StrCat("in '", absl::StrJoin(paths, "', '"), "'");
    };
    absl::StrAppend(&need, ", of that ", SizeText(ranks * of_parameters), " ", in(parameter_paths),
                    " and ", SizeText(ranks * of_states), " ", in(state_paths));
  }
  return need;
}

std::vector<std::span<std::byte>> Registered(std::span<std::byte> staging) {
  return staging.empty() ? std::vector<std::span<std::byte>>() : std::vector{staging};
}

}  // namespace

void SwapStorage::ListArrays() {
  for (const auto& arrays : sharding::LayOutSwapFiles(*plan_).sub_groups) {
    for (const sharding::SwapFiles::Array& array : arrays) {
      end_ = std::max(end_, array.place.offset + sharding::SwapAligned(array.bytes));
      if (array.bytes > 0) begins_.push_back(array.place.offset);
    }
  }
  std::sort(begins_.begin(), begins_.end());
  moved_ = std::vector<std::atomic<uint64_t>>(begins_.size());
}

void SwapStorage::Charge() {
  for (int state = 0; state < kStateClasses; ++state) {
    const StateClass of = static_cast<StateClass>(state);
    charges_[state] = {};  // first, because the peak would count both
    charges_[state] = MemoryLedger::Charge(
        *ledger_, of, Tier::kNvme, sharding::BufferBytes(plan_->table.bytes.Of(Tier::kNvme, of)));
  }
}

absl::Status SwapStorage::CreateFile(ShardFile::Options& options,
                                     std::unique_ptr<ShardFile>& file) {
  if (options.bytes == 0) return absl::OkStatus();
  if (const auto& injected = GivenOverrides().wrap_queue)
    options.wrap_queue = injected(options.owner, options.name);
  EBB_ASSIGN_OR_RETURN(file, ShardFile::Create(options));
  return absl::OkStatus();
}

absl::Status SwapStorage::Create(const Config& config, std::span<std::byte> staging,
                                 int ranks_on_host, std::string_view name) {
  const ShardFile::Options common{
      .directories = {},
      .name = {},
      .owner = std::string(name),
      .whole_need = NeedOnNvme(*plan_, config, ranks_on_host),
      .aio = {.block_bytes = config.aio.block_size,
              .queue_depth = static_cast<int>(RequestsInFlight(config.aio)),
              .threads = static_cast<int>(config.aio.intra_op_parallelism),
              .single_submit = config.aio.single_submit},
      .backend = config.ebb.io_backend,
      .memory = Registered(staging),
      .wrap_queue = {}};
  ranks_on_host_ = ranks_on_host;
  ListArrays();
  Charge();
  ShardFile::Options parameters = common;
  parameters.name = "parameters";
  parameters.directories = config.zero.offload_param.nvme_paths;
  parameters.bytes = plan_->table.bytes.Of(Tier::kNvme, StateClass::kParameter);
  EBB_RETURN_IF_ERROR(CreateFile(parameters, parameter_file_));
  state_options_ = common;
  state_options_.name = "states";
  state_options_.directories = config.zero.offload_optimizer.nvme_paths;
  state_options_.bytes = plan_->table.bytes.state_file();
  return CreateFile(state_options_, state_file_);
}

// Another order can add boundaries, and nothing else.
absl::Status SwapStorage::HasFilesFor(const sharding::Plan& plan) const {
  if (state_file_ != nullptr || plan.table.bytes.state_file() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "boundary activations (Visit::output_bytes) would be on NVMe, but the engine was created "
      "without a file for them: create it with visits that have output_bytes");
}

absl::Status SwapStorage::FollowPlan(std::span<std::byte> staging) {
  state_options_.memory = Registered(staging);
  if (parameter_file_ != nullptr)
    EBB_RETURN_IF_ERROR(parameter_file_->Reopen(std::nullopt, state_options_.memory));
  if (state_file_ != nullptr)
    EBB_RETURN_IF_ERROR(
        state_file_->Reopen(plan_->table.bytes.state_file(), state_options_.memory));
  if (second_file_ != nullptr)
    EBB_RETURN_IF_ERROR(second_file_->Reopen(std::nullopt, state_options_.memory));
  Charge();
  return absl::OkStatus();
}

int SwapStorage::ArrayAt(const sharding::Place& place) const {
  if (place.pool != StateClass::kMaster && place.pool != StateClass::kOptimizer) return -1;
  if (place.offset >= end_) return -1;
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), place.offset);
  return static_cast<int>(next - begins_.begin()) - 1;
}

ShardFile& SwapStorage::File(const sharding::Place& place) const {
  if (place.pool == StateClass::kParameter) return *parameter_file_;
  const int array = ArrayAt(place);
  return StateFile(array >= 0 && (moved_[array].load(std::memory_order_acquire) & kInSecond));
}

ShardFile& SwapStorage::SavedFile(const sharding::Place& place) const {
  const int array = ArrayAt(place);
  if (array < 0 || !has_second_places()) return File(place);
  const uint64_t moved = moved_[array].load(std::memory_order_acquire);
  const bool in_second = (moved & kInSecond) != 0,
             has_moved = static_cast<uint32_t>(moved) == save_;
  return StateFile(in_second != has_moved);
}

bool SwapStorage::MoveTo(const sharding::Place& place, uint32_t save) {
  const int array = ArrayAt(place);
  if (array < 0) return false;
  const uint64_t moved = moved_[array].load(std::memory_order_relaxed);
  if (static_cast<uint32_t>(moved) == save) return false;
  moved_[array].store(((moved & kInSecond) ^ kInSecond) | save, std::memory_order_release);
  return true;
}

absl::Status SwapStorage::TakeSecondPlaces() {
  if (end_ == 0 || has_second_places()) return absl::OkStatus();
  // Room for the checkpoint too, which may be on the same disk.
  const auto striped = static_cast<int64_t>(state_options_.directories.size());
  for (const std::string& directory : state_options_.directories) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(directory, error);
    const auto needed = static_cast<uintmax_t>(2 * end_ / striped * ranks_on_host_);
    if (error || space.available >= needed) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "'", directory, "' has ", sharding::SizeText(static_cast<int64_t>(space.available)),
        " free, of ", sharding::SizeText(static_cast<int64_t>(needed)),
        " for second places of masters and states, and for a checkpoint"));
  }
  ShardFile::Options options = state_options_;
  options.name = "saved-states";
  options.bytes = end_;
  EBB_RETURN_IF_ERROR(CreateFile(options, second_file_));
  const sharding::SwapFiles files = sharding::LayOutSwapFiles(*plan_);
  for (const StateClass state : {StateClass::kMaster, StateClass::kOptimizer}) {
    int64_t held = 0;
    for (const sharding::SwapExtent& extent : files.extents)
      if (extent.what == state) held += sharding::SwapAligned(extent.bytes);
    ledger_->Predict(state, Tier::kNvme, held);
    in_second_[state == StateClass::kMaster ? 0 : 1] =
        MemoryLedger::Charge(*ledger_, state, Tier::kNvme, held);
  }
  return absl::OkStatus();
}

}  // namespace ebb
