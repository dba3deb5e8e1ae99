// Values that rank 0 gives for all ranks: drawn in turn, or known to it alone.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::initial_values_test {
namespace {

// Each element is the generator's next, whatever its name and index: a hidden state, which no other
// source may have.
ModelSpec DrawnInTurn(const std::shared_ptr<std::mt19937>& generator) {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters) {
    parameter.init = [generator](const Slice&, std::span<float> values) -> absl::Status {
      if (generator == nullptr)
        return absl::InternalError("called on a rank that is not the first");
      for (float& value : values) value = static_cast<float>((*generator)() % 1000) / 8;
      return absl::OkStatus();
    };
  }
  return model;
}

// In the order that the option promises.
ParameterValues Drawn() {
  const ModelSpec model = ScriptedModel();
  std::mt19937 generator(7);
  ParameterValues all(model.parameters.size());
  for (const UnitSpec& unit : model.units) {
    for (const bool trainable : {true, false}) {
      for (const ParameterId p : unit.parameters) {
        if (model[p].trainable != trainable) continue;
        std::vector<float>& values = all[static_cast<size_t>(p)];
        values.resize(static_cast<size_t>(Elements(model[p].shape)));
        for (float& value : values) value = static_cast<float>(generator() % 1000) / 8;
      }
    }
  }
  return all;
}

absl::Status CreateEach(int world, const Config& config,
                        const std::function<ModelSpec(int rank)>& model,
                        const std::function<EngineOptions(int rank)>& options,
                        const std::function<absl::Status(Engine&)>& body) {
  return RunThreads(world, [&](World of) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(of, Device::Cpu(1), model(of.rank()), config,
                                                       options(of.rank())));
    return body(engine);
  });
}

class InitialValuesTest : public ::testing::TestWithParam<Setting> {
 protected:
  static std::function<ModelSpec(int)> OnRank0() {
    return [](int rank) {
      return DrawnInTurn(rank == 0 ? std::make_shared<std::mt19937>(7) : nullptr);
    };
  }
  static EngineOptions OfRank0(int /*rank*/) { return {.initial_values_of_rank_0 = true}; }
};
INSTANTIATE_TEST_SUITE_P(Cells, InitialValuesTest, ::testing::ValuesIn(WorldsAndStages({1, 2, 3})),
                         NameOf);

TEST_P(InitialValuesTest, AreDrawnByRank0InOrder) {
  const Scratch scratch;
  for (const bool on_nvme : {false, true}) {
    Config config = ConfigFor(GetParam());
    if (on_nvme) config = OnNvme(config, scratch.path());
    const absl::Status status = CreateEach(
        GetParam().world, config, OnRank0(), OfRank0, [&](Engine& engine) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(const ParameterValues parameters,
                               GatherAll(engine, engine.model(), StateClass::kParameter));
          EXPECT_EQ(parameters, Drawn());
          EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                               GatherAll(engine, engine.model(), StateClass::kMaster));
          EXPECT_EQ(masters, Drawn());
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(InitialValuesTest, AnErrorOfRank0IsEveryRanks) {
  std::vector<std::string> errors(static_cast<size_t>(GetParam().world));
  const auto model = [](int rank) {
    ModelSpec of = DrawnInTurn(rank == 0 ? std::make_shared<std::mt19937>(7) : nullptr);
    if (rank == 0) {
      of.parameters[3].init = [](const Slice&, std::span<float>) {
        return absl::NotFoundError("no such tensor in the file");
      };
    }
    return of;
  };
  const absl::Status status = RunThreads(GetParam().world, [&](World world) -> absl::Status {
    const auto engine = Engine::Create(world, Device::Cpu(1), model(world.rank()),
                                       ConfigFor(GetParam()), OfRank0(world.rank()));
    errors[static_cast<size_t>(world.rank())] = std::string(engine.status().message());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("no such tensor in the file"), std::string::npos) << error;
    EXPECT_NE(error.find("'" + ScriptedModel().parameters[3].name + "'"), std::string::npos);
  }
}

TEST(InitialValuesOfRanksTest, RanksThatDoNotAllTakeThoseOfRank0AreRefused) {
  const absl::Status status = CreateEach(
      2, ConfigFor({.world = 2, .stage = 3}), [](int) { return ScriptedModel(); },
      [](int rank) { return EngineOptions{.initial_values_of_rank_0 = rank == 1}; },
      [](Engine&) { return absl::OkStatus(); });
  EXPECT_NE(status.message().find("EngineOptions::initial_values_of_rank_0 of rank 1 differs"),
            absl::string_view::npos)
      << status;
}

}  // namespace
}  // namespace ebb::testing::initial_values_test
