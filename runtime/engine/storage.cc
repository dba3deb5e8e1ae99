#include "ebb/runtime/engine/storage.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/requests_in_flight.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/budget.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

namespace {

// Before any pool is made.
absl::Status CheckName(const sharding::Plan& plan, std::string_view name) {
  const int64_t(&bytes)[kStateClasses] = plan.pools.file_bytes;
  if (std::all_of(std::begin(bytes), std::end(bytes), [](int64_t of) { return of == 0; }))
    return absl::OkStatus();
  const absl::Status status = SwapDirectory::CheckName(name);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat("EngineOptions::name, which swap directories have: ", status.message()));
}

}  // namespace

absl::Status Storage::Create(const Device& device, const sharding::Plan& plan, const Config& config,
                             int shard, int ranks_on_host, std::string_view name,
                             MemoryLedger& ledger, Allocate allocate,
                             std::optional<Storage>& into) {
  Storage& storage = into.emplace(Storage());
  storage.device_ = &device;
  storage.plan_ = &plan;
  storage.config_ = &config;
  storage.ledger_ = &ledger;
  storage.allocate_ = std::move(allocate);
  storage.shard_ = shard;
  EBB_RETURN_IF_ERROR(CheckName(plan, name));
  storage.TakeBytes();
  EBB_RETURN_IF_ERROR(storage.CreateHostPools());
  EBB_RETURN_IF_ERROR(storage.CreateFiles(ranks_on_host, name));
  Room room;
  absl::Status made = storage.MakeRoom(Tier::kDevice, room);
  for (int state = 0; state < kStateClasses; ++state) {
    storage.buffers_[state] = std::move(room.buffers_[state]);
    storage.charges_[state] = std::move(room.charges_[state]);
  }
  return made;
}

Storage::~Storage() {
  for (Buffer& buffer : buffers_) GiveBack(std::move(buffer));
}

std::shared_ptr<void> Storage::Hold() {
  std::shared_ptr<Held> held = held_.lock();
  if (held == nullptr) held_ = held = std::make_shared<Held>();
  return held;
}

// To those that hold it, if there are any.
void Storage::GiveBack(Buffer buffer) {
  if (buffer.data() == nullptr) return;
  if (const std::shared_ptr<Held> held = held_.lock()) held->buffers.push_back(std::move(buffer));
}

void Storage::TakeBytes() {
  int64_t bytes[kStateClasses][kTiers] = {};
  for (const MemoryRow& row : sharding::PredictMemory(*plan_)) {
    bytes[static_cast<int>(row.state)][static_cast<int>(row.tier)] =
        static_cast<int64_t>(row.predicted_bytes);
  }
  for (int state = 0; state < kStateClasses; ++state) {
    bytes_[state] = bytes[state][static_cast<int>(Tier::kDevice)];
    host_bytes_[state] = bytes[state][static_cast<int>(Tier::kCpu)];
    for (int tier = 0; tier < kTiers; ++tier) {
      const int64_t before = std::exchange(predicted_[state][tier], bytes[state][tier]);
      ledger_->Predict(static_cast<StateClass>(state), static_cast<Tier>(tier),
                       bytes[state][tier] - before);
    }
  }
}

absl::Status Storage::CreateHostPools() {
  for (int state = 0; state < kStateClasses; ++state) {
    const StateClass named = static_cast<StateClass>(state);
    if (host_bytes_[state] > 0) EBB_RETURN_IF_ERROR(CreateHostPool(named));
  }
  return absl::OkStatus();
}

absl::Status Storage::CreateHostPool(StateClass named) {
  const bool pins_parameters = config_->zero.offload_param.pin_memory,
             pins_states = config_->zero.offload_optimizer.pin_memory;
  const bool pins = named == StateClass::kStaging     ? pins_parameters || pins_states
                    : named == StateClass::kParameter ? pins_parameters
                                                      : pins_states;
  const int state = static_cast<int>(named);
  const std::string what = absl::StrCat("the ", std::string(Name(named)), " pool in host memory");
  // A device that has memory of its own locks the pools itself, whatever `pin_memory` is.
  EBB_ASSIGN_OR_RETURN(host_[state],
                       AllocatePinned(host_bytes_[state], pins && SharesHostMemory(), what));
  if (!SharesHostMemory()) EBB_RETURN_IF_ERROR(LockForDevice(state, what));
  below_[state] = MemoryLedger::Charge(*ledger_, named, Tier::kCpu, host_bytes_[state]);
  return absl::OkStatus();
}

absl::Status Storage::FollowPlan() {
  TakeBytes();
  if (state_file_ == nullptr && StateFileBytes() > 0) {
    return absl::InvalidArgumentError(
        "with Visit::output_bytes boundary activations would be on NVMe, where the engine was "
        "created without a file for them: create it with visits that have them");
  }
  constexpr int kStaging = static_cast<int>(StateClass::kStaging);
  if (host_[kStaging].buffer.bytes() != host_bytes_[kStaging]) {
    // None of it is registered when it goes.
    for (const std::unique_ptr<ShardFile>* file : {&parameter_file_, &state_file_})
      if (*file != nullptr) EBB_RETURN_IF_ERROR((*file)->Reopen(/*bytes=*/0, {}));
    if (second_places_ != nullptr)
      EBB_RETURN_IF_ERROR(second_places_->second().Reopen(/*bytes=*/0, {}));
  }
  for (int state = 0; state < kStateClasses; ++state) {
    if (IsKept(state)) continue;
    if (buffers_[state].bytes() != bytes_[state]) {
      charges_[state] = {};
      GiveBack(std::exchange(buffers_[state], Buffer()));
    }
    if (static_cast<StateClass>(state) != kStateStaging.pool &&
        host_[state].buffer.bytes() != host_bytes_[state]) {
      below_[state] = {};
      locked_[state] = {};
      host_[state] = {};
    }
  }
  for (int state = 0; state < kStateClasses; ++state) {
    const StateClass named = static_cast<StateClass>(state);
    if (buffers_[state].bytes() != bytes_[state]) {
      EBB_ASSIGN_OR_RETURN(buffers_[state], allocate_(named, bytes_[state],
                                                      absl::StrCat("the ", std::string(Name(named)),
                                                                   " pool of another order")));
      charges_[state] = MemoryLedger::Charge(*ledger_, named, Tier::kDevice, bytes_[state]);
    }
    if (host_bytes_[state] > 0 && host_[state].buffer.bytes() != host_bytes_[state])
      EBB_RETURN_IF_ERROR(CreateHostPool(named));
  }
  const std::vector<std::span<std::byte>> registered = RegisteredWithFiles();
  if (parameter_file_ != nullptr)
    EBB_RETURN_IF_ERROR(parameter_file_->Reopen(/*bytes=*/0, registered));
  if (state_file_ != nullptr)
    EBB_RETURN_IF_ERROR(state_file_->Reopen(StateFileBytes(), registered));
  if (second_places_ != nullptr)
    EBB_RETURN_IF_ERROR(second_places_->second().Reopen(/*bytes=*/0, registered));
  state_options_.memory = registered;
  ChargeFiles();
  return absl::OkStatus();
}

absl::Status Storage::TakeStateStaging() {
  if (SharesHostMemory() && !HasFiles()) return absl::OkStatus();
  constexpr char kWhat[] = "the pool in host memory that state passes through";
  constexpr int kPool = static_cast<int>(kStateStaging.pool);
  constexpr int64_t kBytes = 2 * sharding::kStateStagingBytes;
  EBB_ASSIGN_OR_RETURN(host_[kPool], AllocatePinned(kBytes, /*pin=*/false, kWhat));
  if (!SharesHostMemory()) EBB_RETURN_IF_ERROR(LockForDevice(kPool, kWhat));
  ledger_->Predict(StateClass::kStaging, Tier::kCpu, kBytes);
  below_[kPool] = MemoryLedger::Charge(*ledger_, StateClass::kStaging, Tier::kCpu, kBytes);
  return absl::OkStatus();
}

// What cannot be locked is used as it is.
absl::Status Storage::LockForDevice(int state, std::string_view what) {
  absl::StatusOr<LockedRange> locked = device_->LockHostMemory(host_[state].buffer.span(), what);
  if (locked.ok()) {
    locked_[state] = *std::move(locked);
    return absl::OkStatus();
  }
  EBB_RETURN_IF_ERROR(device_->status());
  if (!std::exchange(told_of_unlocked_, true)) {
    LogWarning(absl::StrCat(locked.status().message(),
                            ". Going on without: copies from and to it hold up the host and are "
                            "slower, and the system may swap it out"));
  }
  return absl::OkStatus();
}

namespace {

// What the run needs on the disks of a host, where one file finds no room: by class, and over the ranks.
std::string NeedOnNvme(const sharding::Plan& plan, const Config& config, int ranks) {
  using sharding::Megabytes;
  const std::vector<std::string>&parameter_paths = config.zero.offload_param.nvme_paths,
        &state_paths = config.zero.offload_optimizer.nvme_paths;
  std::vector<std::string> classes;
  int64_t of_parameters = 0, of_states = 0;
  for (int state = 0; state < kStateClasses; ++state) {
    const int64_t bytes = plan.pools.file_bytes[state];
    if (bytes == 0) continue;
    const StateClass named = static_cast<StateClass>(state);
    (named == StateClass::kParameter ? of_parameters : of_states) += bytes;
    classes.push_back(absl::StrCat(std::string(Name(named)), " ", Megabytes(bytes)));
  }
  const int64_t all = of_parameters + of_states;
  std::string need = absl::StrCat("this rank needs ", Megabytes(all),
                                  " on NVMe in all: ", absl::StrJoin(classes, ", "));
  if (ranks > 1) {
    absl::StrAppend(&need, "; every rank of this host needs as much, ", ranks, " of them ",
                    Megabytes(ranks * all));
  }
  if (of_parameters > 0 && of_states > 0 && parameter_paths != state_paths) {
    const auto in = [](const std::vector<std::string>& paths) {
      return absl::StrCat("in '", absl::StrJoin(paths, "', '"), "'");
    };
    absl::StrAppend(&need, ", of that ", Megabytes(ranks * of_parameters), " ", in(parameter_paths),
                    " and ", Megabytes(ranks * of_states), " ", in(state_paths));
  }
  return need;
}

}  // namespace

std::vector<std::span<std::byte>> Storage::RegisteredWithFiles() const {
  const Buffer& staging = host_[static_cast<int>(StateClass::kStaging)].buffer;
  return staging.data() == nullptr ? std::vector<std::span<std::byte>>()
                                   : std::vector{staging.span()};
}

int64_t Storage::StateFileBytes() const {
  int64_t bytes = 0;
  for (int state = 0; state < kStateClasses; ++state)
    if (static_cast<StateClass>(state) != StateClass::kParameter)
      bytes += plan_->pools.file_bytes[state];
  return bytes;
}

void Storage::ChargeFiles() {
  for (int state = 0; state < kStateClasses; ++state) {
    below_[kStateClasses + state] =
        MemoryLedger::Charge(*ledger_, static_cast<StateClass>(state), Tier::kNvme,
                             sharding::BufferBytes(plan_->pools.file_bytes[state]));
  }
}

absl::Status Storage::CreateFiles(int ranks_on_host, std::string_view name) {
  const Config& config = *config_;
  const std::string need = NeedOnNvme(*plan_, config, ranks_on_host);
  const std::vector<std::span<std::byte>> registered = RegisteredWithFiles();
  const auto create = [&](const std::vector<std::string>& paths, std::string_view what,
                          int64_t bytes, std::unique_ptr<ShardFile>& file) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    ShardFile::Options options{
        .directories = {},
        .name = std::string(what),
        .bytes = bytes,
        .whole_need = need,
        .aio = {.block_bytes = config.aio.block_size,
                .queue_depth = static_cast<int>(RequestsInFlight(config.aio)),
                .threads = static_cast<int>(config.aio.intra_op_parallelism),
                .single_submit = config.aio.single_submit},
        .backend = config.ebb.io_backend,
        .memory = registered,
        .wrap_queue = {}};
    for (const std::string& path : paths) {
      EBB_ASSIGN_OR_RETURN(SwapDirectory directory, SwapDirectory::Create(path, name));
      options.directories.push_back(directory.path());
      directories_.push_back(std::move(directory));
    }
    if (const auto& injected = GetOffloadTestHooks().wrap_queue)
      options.wrap_queue = injected(options.directories.front(), what);
    EBB_ASSIGN_OR_RETURN(file, ShardFile::Create(options));
    if (what == "states") state_options_ = std::move(options);
    return absl::OkStatus();
  };
  ChargeFiles();
  EBB_RETURN_IF_ERROR(create(config.zero.offload_param.nvme_paths, "parameters",
                             plan_->pools.file_bytes[static_cast<int>(StateClass::kParameter)],
                             parameter_file_));
  return create(config.zero.offload_optimizer.nvme_paths, "states", StateFileBytes(), state_file_);
}

absl::Status Storage::MakeRoom(Tier tier, Room& room) const {
  room.tier_ = tier;
  const bool on_device = tier == Tier::kDevice || SharesHostMemory();
  for (int state = 0; state < kStateClasses; ++state) {
    if (bytes_[state] == 0 || (tier == Tier::kCpu && !IsKept(state))) continue;
    if (buffers_[state].data() != nullptr && SharesHostMemory()) continue;  // stays where it is
    const StateClass named = static_cast<StateClass>(state);
    const std::string what = absl::StrCat("the ", std::string(Name(named)), " pool",
                                          tier == Tier::kCpu ? " of a suspended engine" : "");
    if (on_device) {
      EBB_ASSIGN_OR_RETURN(room.buffers_[state], allocate_(named, bytes_[state], what));
    } else {
      EBB_ASSIGN_OR_RETURN(PinnedMemory memory, AllocatePinned(bytes_[state], /*pin=*/false, what));
      room.buffers_[state] = std::move(memory.buffer);
    }
    room.charges_[state] = MemoryLedger::Charge(*ledger_, named, tier, bytes_[state]);
  }
  return absl::OkStatus();
}

absl::Status Storage::MoveInto(Room room, Stream& stream) {
  const bool predicts = room.tier_ == Tier::kCpu && !std::exchange(host_predicted_, true);
  for (int state = 0; state < kStateClasses; ++state) {
    if (bytes_[state] == 0 || !IsKept(state)) continue;
    const StateClass named = static_cast<StateClass>(state);
    if (room.buffers_[state].data() == nullptr) {
      room.buffers_[state] = std::move(buffers_[state]);
      room.charges_[state] = MemoryLedger::Charge(*ledger_, named, room.tier_, bytes_[state]);
    } else {
      stream.Copy(room.buffers_[state].data(), buffers_[state].data(), bytes_[state]);
    }
    if (predicts) ledger_->Predict(named, Tier::kCpu, bytes_[state]);
  }
  stream.WaitIdle();
  EBB_RETURN_IF_ERROR(stream.status());
  for (int state = 0; state < kStateClasses; ++state) {
    GiveBack(std::exchange(buffers_[state], std::exchange(room.buffers_[state], Buffer())));
    charges_[state] = std::exchange(room.charges_[state], MemoryLedger::Charge());
  }
  return absl::OkStatus();
}

std::byte* Storage::At(const sharding::Place& place) const {
  const int pool = static_cast<int>(place.pool);
  std::byte* const base =
      place.tier == Tier::kDevice ? buffers_[pool].data() : host_[pool].buffer.data();
  const int slice = place.of_secondary ? shard_ % plan_->decisions.secondary_shards : shard_;
  return base + place.offset + slice * place.per_slice;
}

bool Storage::CopiesHoldUpHost(const sharding::Place& place) const {
  return !SharesHostMemory() && locked_[static_cast<int>(place.pool)].span().empty();
}

ShardFile& Storage::File(const sharding::Place& place) const {
  if (place.pool == StateClass::kParameter) return *parameter_file_;
  return second_places_ != nullptr ? second_places_->Current(place) : *state_file_;
}

ShardFile& Storage::SavedFile(const sharding::Place& place) const {
  const bool has_two = second_places_ != nullptr && place.pool != StateClass::kParameter;
  return has_two ? second_places_->Saved(place) : File(place);
}

absl::Status Storage::TakeSecondPlaces(const sharding::SwapFiles& files, int ranks_on_host) {
  const int64_t bytes = SecondPlaces::BytesOf(files);
  if (bytes == 0 || second_places_ != nullptr) return absl::OkStatus();
  // Room for the checkpoint, too, which may be on the same disk.
  const auto striped = static_cast<int64_t>(state_options_.directories.size());
  for (const std::string& directory : state_options_.directories) {
    std::error_code error;
    const std::filesystem::space_info space = std::filesystem::space(directory, error);
    const auto needed = static_cast<uintmax_t>(2 * bytes / striped * ranks_on_host);
    if (error || space.available >= needed) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "'", directory, "' has ", sharding::Megabytes(static_cast<int64_t>(space.available)),
        " free, of ", sharding::Megabytes(static_cast<int64_t>(needed)),
        " for second places of masters and states, and for a checkpoint"));
  }
  ShardFile::Options options = state_options_;
  options.name = "saved-states";
  options.bytes = bytes;
  if (const auto& injected = GetOffloadTestHooks().wrap_queue)
    options.wrap_queue = injected(options.directories.front(), options.name);
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<ShardFile> second, ShardFile::Create(options));
  int64_t of_class[2] = {};
  for (const sharding::SwapExtent& extent : files.extents) {
    if (extent.what == StateClass::kMaster) of_class[0] += sharding::SwapAligned(extent.bytes);
    if (extent.what == StateClass::kOptimizer) of_class[1] += sharding::SwapAligned(extent.bytes);
  }
  for (const StateClass state : {StateClass::kMaster, StateClass::kOptimizer}) {
    const int64_t held = of_class[state == StateClass::kMaster ? 0 : 1];
    ledger_->Predict(state, Tier::kNvme, held);
    in_second_[state == StateClass::kMaster ? 0 : 1] =
        MemoryLedger::Charge(*ledger_, state, Tier::kNvme, held);
  }
  second_places_ = std::make_unique<SecondPlaces>(files, *state_file_, std::move(second));
  return absl::OkStatus();
}

absl::Status Storage::CheckFiles() const {
  for (const std::unique_ptr<ShardFile>* file : {&parameter_file_, &state_file_}) {
    if (*file != nullptr) EBB_RETURN_IF_ERROR((*file)->CheckUnchanged());
  }
  if (second_places_ != nullptr) return second_places_->second().CheckUnchanged();
  return absl::OkStatus();
}

std::byte* Storage::Gradient(int visit) const {
  return OnDevice(StateClass::kGradient, plan_->pools.visits[visit].gradient);
}

std::byte* Storage::Output(int visit, int index_in_round) const {
  const sharding::VisitAddresses& addresses = plan_->pools.visits[visit];
  return OnDevice(StateClass::kActivation,
                  addresses.output + index_in_round * addresses.boundary_stride);
}

std::byte* Storage::OutputGradient(int visit, int index_in_round) const {
  const sharding::VisitAddresses& addresses = plan_->pools.visits[visit];
  return OnDevice(StateClass::kActivation,
                  addresses.output_gradient + index_in_round * addresses.boundary_stride);
}

std::byte* Storage::EvaluationOutput(int visit, int micro_batch) const {
  return OnDevice(StateClass::kActivation, plan_->pools.EvaluationOutput(visit, micro_batch));
}

std::byte* Storage::Staging(int64_t address) const {
  return OnDevice(StateClass::kStaging, address);
}
std::byte* Storage::ExchangeRecords() const {
  return OnDevice(StateClass::kStaging, plan_->pools.staging_exchange);
}
float* Storage::GradientStaging(Tier tier) const {
  return reinterpret_cast<float*>(
      tier == Tier::kDevice ? OnDevice(StateClass::kStaging, plan_->pools.staging_gradient)
                            : At(plan_->pools.host_gradient));
}
float* Storage::MasterStaging(Tier tier) const {
  return reinterpret_cast<float*>(tier == Tier::kDevice
                                      ? OnDevice(StateClass::kStaging, plan_->pools.staging_master)
                                      : At(plan_->pools.host_master));
}
std::byte* Storage::Workspace() const {
  return OnDevice(StateClass::kWorkspace, 0);
}

}  // namespace ebb
