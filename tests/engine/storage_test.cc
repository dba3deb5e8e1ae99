// Pools of a device with memory that is not the host's: kept bytes are copied, other memory is
// given back, and the ledger says where everything is. And which of a host's pools are locked.
#include "ebb/runtime/engine/memory/storage.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/offload/locked_memory.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"

namespace ebb::testing::storage_test {
namespace {

// Says that it is a device of another kind. The device's memory is counted, and ends at a limit.
class FarDevice : public DeviceBackend {
 public:
  static inline int64_t held = 0, limit = 0;

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string description() const override { return "a far device"; }
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override {
    return near_.backend().NewStream(name, tasks_max);
  }
  std::unique_ptr<StreamBackend> CallerStream() override { return near_.backend().CallerStream(); }
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override {
    return near_.backend().NewEvent();
  }
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override {
    if (held + bytes > limit) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no room for ", absl::string_view(what.data(), what.size())));
    }
    held += bytes;
    return Buffer(std::calloc(1, static_cast<size_t>(bytes)), bytes,
                  [](void* data, int64_t size, int) {
                    held -= size;
                    std::free(data);
                  });
  }

 private:
  Device near_ = Device::Cpu(1);
};

class StorageTest : public ::testing::Test {
 protected:
  StorageTest() {
    FarDevice::held = 0;
    FarDevice::limit = INT64_MAX;
    Config config = ConfigFor({.world = 2, .stage = 2});
    config.compute = DType::kBFloat16;
    const ModelSpec model = ScriptedModel();
    const Config resolved = config.ForWorld(2).value();
    plan_ = sharding::PlanStep(
                {.model = &model, .config = &resolved, .world = 2, .optimizer_states = 2})
                .value();
    ExpectOk(Storage::Create(
        device_, plan_, resolved, 1, 2, "test", ledger_,
        [this](StateClass, int64_t bytes, std::string_view what) {
          return device_.Allocate(bytes, what);
        },
        storage_));
  }

  Storage::Room RoomIn(Tier tier) const {
    Storage::Room room;
    EXPECT_OK(storage_->MakeRoom(tier, room));
    return room;
  }

  uint64_t Current(StateClass state, Tier tier) const {
    for (const MemoryRow& row : ledger_.Rows()) {
      if (row.state == state && row.tier == tier) return row.current_bytes;
    }
    return 0;
  }
  uint64_t Current(Tier tier) const {
    uint64_t sum = 0;
    for (int state = 0; state < kStateClasses; ++state)
      sum += Current(static_cast<StateClass>(state), tier);
    return sum;
  }
  // The first bytes of the kept data.
  std::vector<void*> Kept() const {
    return {At(sharding::Purpose::kParameter, 0), Master(1), At(sharding::Purpose::kState, 3),
            At(sharding::Purpose::kState, 4, /*state=*/1)};
  }
  std::byte* At(sharding::Purpose purpose, int unit, int state = 0) const {
    const int row = plan_.table.Find(purpose, unit, /*trainable=*/true, state);
    return storage_->At(plan_.table.PlaceOf(row));
  }
  std::byte* Master(int unit) const { return At(sharding::Purpose::kMaster, unit); }

  Device device_{std::make_shared<FarDevice>()};
  Stream stream_ = device_.NewStream("copies").value();
  MemoryLedger ledger_;
  sharding::Plan plan_;
  std::optional<Storage> storage_;
};

TEST_F(StorageTest, MovesKeptPoolsAndFreesTheRest) {
  const int64_t all = FarDevice::held;
  EXPECT_EQ(Current(Tier::kDevice), static_cast<uint64_t>(all));
  unsigned char value = 1;
  for (void* kept : Kept()) std::memset(kept, value++, 64);
  const std::vector<void*> on_device = Kept();

  Storage::Room host = RoomIn(Tier::kCpu);
  EXPECT_EQ(Current(Tier::kDevice), static_cast<uint64_t>(all));  // both, for a moment
  EXPECT_EQ(Current(Tier::kCpu), Current(StateClass::kParameter, Tier::kDevice) +
                                     Current(StateClass::kMaster, Tier::kDevice) +
                                     Current(StateClass::kOptimizer, Tier::kDevice));
  EXPECT_OK(storage_->MoveInto(std::move(host), stream_));
  EXPECT_EQ(FarDevice::held, 0);
  EXPECT_EQ(Current(Tier::kDevice), 0u);
  EXPECT_GT(Current(StateClass::kMaster, Tier::kCpu), 0u);

  const auto expect_values = [&] {
    unsigned char expected = 1;
    for (void* kept : Kept()) {
      const std::vector<unsigned char> pattern(64, expected++);
      EXPECT_EQ(std::memcmp(kept, pattern.data(), pattern.size()), 0) << int{expected};
    }
  };
  expect_values();
  for (size_t i = 0; i < on_device.size(); ++i) EXPECT_NE(Kept()[i], on_device[i]);

  EXPECT_OK(storage_->MoveInto(RoomIn(Tier::kDevice), stream_));
  EXPECT_EQ(FarDevice::held, all);
  EXPECT_EQ(Current(Tier::kDevice), static_cast<uint64_t>(all));
  EXPECT_EQ(Current(Tier::kCpu), 0u);
  expect_values();
  std::memset(At(sharding::Purpose::kGradient, 0), 1, 64);
}

TEST_F(StorageTest, WithoutRoomItStaysWhereItIs) {
  const int64_t all = FarDevice::held;
  std::memset(Master(1), 7, 64);
  EXPECT_OK(storage_->MoveInto(RoomIn(Tier::kCpu), stream_));
  FarDevice::limit = all - 1;
  {
    Storage::Room room;
    const absl::Status refused = storage_->MakeRoom(Tier::kDevice, room);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_GT(FarDevice::held, 0);  // until the ranks have agreed
  }
  EXPECT_EQ(FarDevice::held, 0);  // the attempt leaves nothing behind either
  EXPECT_EQ(Current(Tier::kDevice), 0u);
  EXPECT_EQ(*reinterpret_cast<unsigned char*>(Master(1)), 7);
  FarDevice::limit = all;
  EXPECT_OK(storage_->MoveInto(RoomIn(Tier::kDevice), stream_));
  EXPECT_EQ(*reinterpret_cast<unsigned char*>(Master(1)), 7);
}

TEST_F(StorageTest, RoomThatIsNotMovedIntoIsGivenBack) {
  const int64_t all = FarDevice::held;
  { const Storage::Room unused = RoomIn(Tier::kCpu); }
  EXPECT_EQ(Current(Tier::kCpu), 0u);
  EXPECT_EQ(FarDevice::held, all);
}

TEST_F(StorageTest, HeldMemoryIsFreedByItsLastHolder) {
  const int64_t all = FarDevice::held;
  std::shared_ptr<void> held = storage_->Hold();
  std::shared_ptr<void> other = storage_->Hold();
  std::byte* const gradient = At(sharding::Purpose::kGradient, 0);
  EXPECT_OK(storage_->MoveInto(RoomIn(Tier::kCpu), stream_));
  EXPECT_EQ(FarDevice::held, all);
  std::memset(gradient, 1, 64);
  EXPECT_OK(storage_->MoveInto(RoomIn(Tier::kDevice), stream_));
  EXPECT_EQ(FarDevice::held, 2 * all);
  storage_.reset();
  EXPECT_EQ(FarDevice::held, 2 * all);
  std::memset(gradient, 2, 64);
  held.reset();
  EXPECT_EQ(FarDevice::held, 2 * all);
  other.reset();
  EXPECT_EQ(FarDevice::held, 0);
}

TEST_F(StorageTest, MemoryThatIsNoLongerHeldIsFreedAtOnce) {
  storage_->Hold().reset();
  storage_.reset();
  EXPECT_EQ(FarDevice::held, 0);
}

// An engine on the CPU: its pools in host memory are this process's own.
TEST(HostPoolsTest, AreLockedOnlyIfAsked) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers make mlock do nothing";
#endif
  const Scratch scratch;
  const ModelSpec model = ScriptedModel();
  for (const Tier tier : {Tier::kCpu, Tier::kNvme}) {
    Config config = OnNvme(ConfigFor({.world = 1, .stage = 3}), scratch.path());
    config.zero.offload_param.device = config.zero.offload_optimizer.device = tier;
    ASSERT_OK_AND_ASSIGN(const Program program, PredictProgram(model, 1, config));
    const int64_t host_bytes = sharding::HostBytes(program.plan().table.bytes);
    ASSERT_GT(host_bytes, 0);
    const auto pin_both = [&](bool pin) {
      config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = pin;
    };
    const int64_t before = LockedBytes();
    const auto locked_by_one = [&]() -> int64_t {
      const auto engine = Engine::Create(World::Single(), Device::Cpu(1), model, config);
      EXPECT_OK(engine);
      return LockedBytes() - before;
    };
    pin_both(false);
    EXPECT_EQ(locked_by_one(), 0);
    {
      ASSERT_OK_AND_ASSIGN(auto probe,
                           AllocatePinned(host_bytes + (int64_t{1} << 20), /*pin=*/true, "a test"));
      if (!probe.pinned) GTEST_SKIP() << "no such memory can be locked here";
    }
    pin_both(true);
    const int64_t locked = locked_by_one();
    EXPECT_GE(locked, host_bytes);
    EXPECT_LE(locked, host_bytes + kStateClasses * 4096);  // no more than whole pages of each
    EXPECT_EQ(LockedBytes(), before);
  }
}

}  // namespace
}  // namespace ebb::testing::storage_test
