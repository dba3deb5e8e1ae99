#include "ebb/runtime/engine/memory/storage.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {
namespace {

// State that steps leave to each other.
bool IsKept(int state) {
  return state == static_cast<int>(StateClass::kParameter) ||
         state == static_cast<int>(StateClass::kMaster) ||
         state == static_cast<int>(StateClass::kOptimizer);
}

std::string PoolName(StateClass state) {
  return absl::StrCat("the ", std::string(Name(state)), " pool");
}

}  // namespace

absl::Status Storage::Create(const Device& device, const sharding::Plan& plan, const Config& config,
                             int shard, int ranks_on_host, std::string_view name,
                             MemoryLedger& ledger, Allocate allocate,
                             std::optional<Storage>& into) {
  Storage& storage = into.emplace(Storage());
  storage.device_ = &device;
  storage.plan_ = &plan;
  storage.ledger_ = &ledger;
  storage.allocate_ = std::move(allocate);
  storage.shard_ = shard;
  storage.host_ = HostPools(device, config, ledger);
  storage.files_ = std::make_unique<SwapStorage>(plan, ledger);
  storage.TakeBytes();
  for (int state = 0; state < kStateClasses; ++state) {
    EBB_RETURN_IF_ERROR(
        storage.host_.Take(static_cast<StateClass>(state), storage.BytesOf(state, Tier::kCpu)));
  }
  EBB_RETURN_IF_ERROR(
      storage.files_->Create(config, storage.host_.Of(StateClass::kStaging), ranks_on_host, name));
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

// To the ranks that hold it, if there are any.
void Storage::GiveBack(Buffer buffer) {
  if (buffer.data() == nullptr) return;
  if (const std::shared_ptr<Held> held = held_.lock()) held->buffers.push_back(std::move(buffer));
}

void Storage::TakeBytes() {
  int64_t before[kStateClasses][kTiers];
  std::copy(&bytes_[0][0], &bytes_[0][0] + kStateClasses * kTiers, &before[0][0]);
  std::fill(&bytes_[0][0], &bytes_[0][0] + kStateClasses * kTiers, 0);
  for (const MemoryRow& row : sharding::PredictMemory(plan_->table.bytes)) {
    bytes_[static_cast<int>(row.state)][static_cast<int>(row.tier)] =
        static_cast<int64_t>(row.predicted_bytes);
  }
  for (int state = 0; state < kStateClasses; ++state) {
    for (int tier = 0; tier < kTiers; ++tier) {
      ledger_->Predict(static_cast<StateClass>(state), static_cast<Tier>(tier),
                       bytes_[state][tier] - before[state][tier]);
    }
  }
}

absl::Status Storage::FollowPlan() {
  TakeBytes();
  const auto is_on_host = [this](StateClass state) {
    return std::ssize(host_.Of(state)) == BytesOf(static_cast<int>(state), Tier::kCpu) ||
           state == HostPools::kStateStaging.pool || state == HostPools::kSaveStaging.pool;
  };
  if (!is_on_host(StateClass::kStaging)) EBB_RETURN_IF_ERROR(files_->FollowPlan({}));
  for (int state = 0; state < kStateClasses; ++state) {
    if (IsKept(state)) continue;
    if (!is_on_host(static_cast<StateClass>(state))) host_.GiveBack(static_cast<StateClass>(state));
    if (buffers_[state].bytes() == BytesOf(state, Tier::kDevice)) continue;
    charges_[state] = {};
    GiveBack(std::exchange(buffers_[state], Buffer()));
  }
  for (int state = 0; state < kStateClasses; ++state) {
    const StateClass named = static_cast<StateClass>(state);
    if (!is_on_host(named)) EBB_RETURN_IF_ERROR(host_.Take(named, BytesOf(state, Tier::kCpu)));
    const int64_t bytes = BytesOf(state, Tier::kDevice);
    if (buffers_[state].bytes() == bytes) continue;
    EBB_ASSIGN_OR_RETURN(buffers_[state], allocate_(named, bytes, PoolName(named)));
    charges_[state] = MemoryLedger::Charge(*ledger_, named, Tier::kDevice, bytes);
  }
  return files_->FollowPlan(host_.Of(StateClass::kStaging));
}

absl::Status Storage::TakeStateStaging() {
  if (HostReaches(*device_) && !files_->exist()) return absl::OkStatus();
  return host_.TakeStateStaging();
}

absl::Status Storage::TakeSaveStaging(int64_t bytes) {
  if (HostReaches(*device_) && !files_->exist()) return absl::OkStatus();
  return host_.TakeSaveStaging(bytes);
}

absl::Status Storage::MakeRoom(Tier tier, Room& room) const {
  room.tier_ = tier;
  const bool on_device = tier == Tier::kDevice || HostReaches(*device_);
  for (int state = 0; state < kStateClasses; ++state) {
    const int64_t bytes = BytesOf(state, Tier::kDevice);
    if (bytes == 0 || (tier == Tier::kCpu && !IsKept(state))) continue;
    if (buffers_[state].data() != nullptr && HostReaches(*device_)) continue;  // stays where it is
    const StateClass named = static_cast<StateClass>(state);
    const std::string what =
        absl::StrCat(PoolName(named), tier == Tier::kCpu ? " of a suspended engine" : "");
    if (on_device) {
      EBB_ASSIGN_OR_RETURN(room.buffers_[state], allocate_(named, bytes, what));
    } else {
      EBB_ASSIGN_OR_RETURN(PinnedMemory memory, AllocatePinned(bytes, /*pin=*/false, what));
      room.buffers_[state] = std::move(memory.buffer);
    }
    room.charges_[state] = MemoryLedger::Charge(*ledger_, named, tier, bytes);
  }
  return absl::OkStatus();
}

absl::Status Storage::MoveInto(Room room, Stream& stream) {
  const bool predicts = room.tier_ == Tier::kCpu && !std::exchange(host_predicted_, true);
  for (int state = 0; state < kStateClasses; ++state) {
    const int64_t bytes = BytesOf(state, Tier::kDevice);
    if (bytes == 0 || !IsKept(state)) continue;
    const StateClass named = static_cast<StateClass>(state);
    if (room.buffers_[state].data() == nullptr) {
      room.buffers_[state] = std::move(buffers_[state]);
      room.charges_[state] = MemoryLedger::Charge(*ledger_, named, room.tier_, bytes);
    } else {
      stream.Copy(room.buffers_[state].data(), buffers_[state].data(), bytes);
    }
    if (predicts) ledger_->Predict(named, Tier::kCpu, bytes);
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
  const sharding::Place own = sharding::OwnPlace(*plan_, place, shard_);
  std::byte* const base = own.tier == Tier::kDevice ? buffers_[static_cast<int>(own.pool)].data()
                                                    : host_.Of(own.pool).data();
  return base + own.offset;
}

}  // namespace ebb
