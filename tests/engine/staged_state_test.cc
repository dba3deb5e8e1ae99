// State that passes through the staging between disk and host: more than a slot holds, and with a
// read running while a sink or a source has the values of another slot.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/state_pieces.h"
#include "tests/engine/snapshot.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::staged_state_test {
namespace {

constexpr Setting kSetting = {.world = 2, .stage = 3};

struct Masters {
  const char* name;
  DType compute = DType::kBFloat16;
  bool split = false;
};
void PrintTo(const Masters& masters, std::ostream* out) {
  *out << masters.name;
}

// Three runs a rank, and sub-groups that end within them.
ModelSpec LargeModel() {
  ModelSpec model;
  model.Add(model.AddUnit("small"), {.name = "few", .shape = {3}, .init = Normal(1, 1)});
  const UnitId unit = model.AddUnit("large");
  model.Add(unit, {.name = "rows", .shape = {4100, 1100}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "odd", .shape = {12'345}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "base", .shape = {70}, .init = Normal(1, 1), .trainable = false});
  model.forward = {{.unit = UnitId{0}}, {.unit = unit}};
  return model;
}

absl::Status Written(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((slice.begin + static_cast<int64_t>(i)) % 127 - 63);
  return absl::OkStatus();
}

class StagedStateTest : public ::testing::TestWithParam<Masters> {
 protected:
  void Run(const std::function<absl::Status(Engine& engine)>& body) {
    Config config = OnNvme(ConfigFor(kSetting), scratch_.path());
    config.compute = GetParam().compute;
    config.ebb.split_master = GetParam().split;
    config.zero.sub_group_size = 700'000;
    config.zero.offload_param.max_in_cpu = 0;
    RunOn(kSetting, model_, config, [&](Engine& engine, ScriptedTrainer&) { return body(engine); });
  }
  // This rank's, in the order in which they come; `between` is called with each.
  absl::StatusOr<std::vector<float>> Values(
      Engine& engine, StateClass what,
      absl::FunctionRef<absl::Status()> between = [] { return absl::OkStatus(); }) {
    std::vector<float> all;
    EBB_RETURN_IF_ERROR(engine.Read(
        what,
        [&](const Slice&, std::span<const float> values) {
          all.insert(all.end(), values.begin(), values.end());
          return between();
        },
        what == StateClass::kOptimizer ? "exp_avg" : ""));
    return all;
  }

  const Scratch scratch_;
  const ModelSpec model_ = LargeModel();
};
INSTANTIATE_TEST_SUITE_P(Kinds, StagedStateTest,
                         ::testing::Values(Masters{.name = "fp32", .compute = DType::kFloat32},
                                           Masters{.name = "bf16"},
                                           Masters{.name = "split", .split = true}),
                         [](const auto& of) { return std::string(of.param.name); });

TEST_P(StagedStateTest, SinksAndSourcesMayReadOtherState) {
  Run([&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kOptimizer, Written, "exp_avg"));
    EBB_ASSIGN_OR_RETURN(const std::vector<float> masters, Values(engine, StateClass::kMaster));
    EBB_ASSIGN_OR_RETURN(const std::vector<float> states, Values(engine, StateClass::kOptimizer));
    const auto states_again = [&]() -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const std::vector<float> again, Values(engine, StateClass::kOptimizer));
      EXPECT_TRUE(again == states);
      return absl::OkStatus();
    };
    EBB_ASSIGN_OR_RETURN(const std::vector<float> between,
                         Values(engine, StateClass::kMaster, states_again));
    EXPECT_TRUE(between == masters);
    EBB_RETURN_IF_ERROR(
        engine.Write(StateClass::kMaster, [&](const Slice& slice, std::span<float> values) {
          const absl::Status read = states_again();
          return read.ok() ? Written(slice, values) : read;
        }));
    std::vector<float> written;
    EBB_RETURN_IF_ERROR(
        engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
          written.resize(values.size());
          EXPECT_TRUE(Written(slice, written).ok());
          EXPECT_TRUE(std::equal(values.begin(), values.end(), written.begin())) << slice.begin;
          return absl::OkStatus();
        }));
    return absl::OkStatus();
  });
}

// The read of the next values is on its way when a sink has had enough.
TEST_P(StagedStateTest, AWriteAfterASinkGaveUpIsReadBack) {
  Run([&](Engine& engine) -> absl::Status {
    for (int calls = 1; calls <= 3; ++calls) {
      int seen = 0;
      const absl::Status enough =
          engine.Read(StateClass::kMaster, [&](const Slice&, std::span<const float>) {
            return ++seen < calls ? absl::OkStatus() : absl::CancelledError("enough");
          });
      EXPECT_EQ(enough, absl::CancelledError("enough"));
      const auto other = [&](const Slice& slice, std::span<float> values) {
        const absl::Status status = Written(slice, values);
        for (float& value : values) value += static_cast<float>(calls);
        return status;
      };
      EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, other));
      std::vector<float> expected;
      EBB_RETURN_IF_ERROR(
          engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
            expected.resize(values.size());
            EXPECT_TRUE(other(slice, expected).ok());
            EXPECT_TRUE(std::equal(values.begin(), values.end(), expected.begin())) << calls;
            return absl::OkStatus();
          }));
    }
    return absl::OkStatus();
  });
}

TEST_P(StagedStateTest, TheStagingIsCounted) {
  Run([&](Engine& engine) -> absl::Status {
    uint64_t predicted = 0, counted = 0;
    for (const MemoryRow& row : engine.memory()) {
      if (row.state != StateClass::kStaging || row.tier != Tier::kCpu) continue;
      predicted = row.predicted_bytes;
      counted = row.current_bytes;
    }
    EBB_ASSIGN_OR_RETURN(const std::vector<MemoryRow> planned,
                         PredictMemory(model_, kSetting.world, engine.config()));
    uint64_t slots = 0;
    for (const MemoryRow& row : planned)
      if (row.state == StateClass::kStaging && row.tier == Tier::kCpu) slots = row.predicted_bytes;
    EXPECT_EQ(counted, slots + 2 * sharding::kStateStagingBytes);
    EXPECT_EQ(predicted, counted);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace ebb::testing::staged_state_test
