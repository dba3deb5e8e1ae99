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

namespace ebb {
namespace {

// The run's need on the disks of a host, where one file finds no room: by class, and over the
// ranks.
std::string NeedOnNvme(const sharding::Plan& plan, const Config& config, int ranks) {
  using sharding::SizeText;
  const std::vector<std::string>&parameter_paths = config.zero.offload_param.nvme_paths,
        &state_paths = config.zero.offload_optimizer.nvme_paths;
  std::vector<std::string> classes;
  int64_t of_parameters = 0, of_states = 0;
  for (int state = 0; state < kStateClasses; ++state) {
    const int64_t bytes = plan.pools.file_bytes[state];
    if (bytes == 0) continue;
    const StateClass named = static_cast<StateClass>(state);
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

void SwapStorage::Charge() {
  for (int state = 0; state < kStateClasses; ++state) {
    charges_[state] = {};  // first, because the peak would count both
    charges_[state] = MemoryLedger::Charge(*ledger_, static_cast<StateClass>(state), Tier::kNvme,
                                           sharding::BufferBytes(plan_->pools.file_bytes[state]));
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
  Charge();
  ShardFile::Options parameters = common;
  parameters.name = "parameters";
  parameters.directories = config.zero.offload_param.nvme_paths;
  parameters.bytes = plan_->pools.file_bytes[static_cast<int>(StateClass::kParameter)];
  EBB_RETURN_IF_ERROR(CreateFile(parameters, parameter_file_));
  state_options_ = common;
  state_options_.name = "states";
  state_options_.directories = config.zero.offload_optimizer.nvme_paths;
  state_options_.bytes = plan_->pools.state_file_bytes();
  return CreateFile(state_options_, state_file_);
}

// Another order can add boundaries, and nothing else.
absl::Status SwapStorage::HasFilesFor(const sharding::Plan& plan) const {
  if (state_file_ != nullptr || plan.pools.state_file_bytes() == 0) return absl::OkStatus();
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
        state_file_->Reopen(plan_->pools.state_file_bytes(), state_options_.memory));
  if (second_places_ != nullptr)
    EBB_RETURN_IF_ERROR(second_places_->second().Reopen(std::nullopt, state_options_.memory));
  Charge();
  return absl::OkStatus();
}

ShardFile& SwapStorage::File(const sharding::Place& place) const {
  if (place.pool == StateClass::kParameter) return *parameter_file_;
  return second_places_ != nullptr ? second_places_->Current(place) : *state_file_;
}

ShardFile& SwapStorage::SavedFile(const sharding::Place& place) const {
  const bool has_two = second_places_ != nullptr && place.pool != StateClass::kParameter;
  return has_two ? second_places_->Saved(place) : File(place);
}

absl::Status SwapStorage::TakeSecondPlaces(const sharding::SwapFiles& files, int ranks_on_host) {
  const int64_t bytes = SecondPlaces::BytesOf(files);
  if (bytes == 0 || second_places_ != nullptr) return absl::OkStatus();
  // Room for the checkpoint too, which may be on the same disk.
  const auto striped = static_cast<int64_t>(state_options_.directories.size());
  for (const std::string& directory : state_options_.directories) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(directory, error);
    const auto needed = static_cast<uintmax_t>(2 * bytes / striped * ranks_on_host);
    if (error || space.available >= needed) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "'", directory, "' has ", sharding::SizeText(static_cast<int64_t>(space.available)),
        " free, of ", sharding::SizeText(static_cast<int64_t>(needed)),
        " for second places of masters and states, and for a checkpoint"));
  }
  ShardFile::Options options = state_options_;
  options.name = "saved-states";
  options.bytes = bytes;
  std::unique_ptr<ShardFile> second;
  EBB_RETURN_IF_ERROR(CreateFile(options, second));
  for (const StateClass state : {StateClass::kMaster, StateClass::kOptimizer}) {
    int64_t held = 0;
    for (const sharding::SwapExtent& extent : files.extents)
      if (extent.what == state) held += sharding::SwapAligned(extent.bytes);
    ledger_->Predict(state, Tier::kNvme, held);
    in_second_[state == StateClass::kMaster ? 0 : 1] =
        MemoryLedger::Charge(*ledger_, state, Tier::kNvme, held);
  }
  second_places_ = std::make_unique<SecondPlaces>(files, *state_file_, std::move(second));
  return absl::OkStatus();
}

}  // namespace ebb
