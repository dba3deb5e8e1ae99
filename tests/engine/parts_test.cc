// Engines of the parts of a world (World::Split): what they decide by themselves, and how their
// messages name ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::parts_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Config Plain() {
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = 1;
  config.gradient_clipping = 0;
  config.ebb.check_overflow = false;
  config.ebb.timeout_seconds = 120;
  return config;
}

// The log of four ranks' engines at Create. The parts have the world ranks 0 and 2, and 1 and 3;
// with `parts` 1 there is one part, of all ranks.
std::string LogOfCreate(const Config& config, int parts) {
  ::testing::internal::CaptureStderr();
  OnThreads(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() % parts, world.rank()));
    const ToyModel model({});
    return Engine::Create(part, Device::Cpu(1), model.spec(), config).status();
  });
  return ::testing::internal::GetCapturedStderr();
}

struct Decided {
  std::string name;
  void (*set)(Config& config);
  std::string what;  // in the warning
};

class PartsDecideTest : public ::testing::TestWithParam<Decided> {};

TEST_P(PartsDecideTest, OnlyThePartOfWorldRankZeroWarns) {
  Config config = Plain();
  GetParam().set(config);
  const std::string log = LogOfCreate(config, 2);
  EXPECT_EQ(Occurrences(log, "with 2 of 4 ranks, and only the part's gradients decide about " +
                                 GetParam().what +
                                 ". If the parts hold one model, they do this differently from "
                                 "each other, and StepReport::gradient_norm is of the part alone; "
                                 "EngineOptions::verdict mends it"),
            1)
      << log;
  EXPECT_THAT(LogOfCreate(config, 1), Not(HasSubstr("part of another")));
}

INSTANTIATE_TEST_SUITE_P(
    Parts, PartsDecideTest,
    ::testing::Values(Decided{"Clipping", [](Config& config) { config.gradient_clipping = 0.5; },
                              "clipping (gradient_clipping)"},
                      Decided{"Fp16", [](Config& config) { config.compute = DType::kFloat16; },
                              "the loss scale (fp16)"},
                      Decided{"Overflow", [](Config& config) { config.ebb.check_overflow = true; },
                              "skipped steps (ebb.check_overflow)"},
                      Decided{"Lamb",
                              [](Config& config) { config.optimizer.type = OptimizerType::kLamb; },
                              "the ratios of LAMB or LARS (optimizer.type)"},
                      Decided{"All",
                              [](Config& config) {
                                config.gradient_clipping = 1;
                                config.compute = DType::kFloat16;
                                config.optimizer.type = OptimizerType::kLars;
                              },
                              "clipping (gradient_clipping), the loss scale (fp16), the ratios of "
                              "LAMB or LARS (optimizer.type)"}),
    [](const auto& test) { return test.param.name; });

TEST(Parts, AnEngineThatDecidesNothingOfThatKindDoesNotWarn) {
  EXPECT_THAT(LogOfCreate(Plain(), 2), Not(HasSubstr("part of another")));
}

// The part of world ranks 1 and 3; its ranks fail in `body`.
std::vector<absl::Status> OfOddRanks(absl::Status (*body)(World part)) {
  std::vector<absl::Status> all = StatusesOnThreads(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() % 2, world.rank()));
    return world.rank() % 2 == 1 ? body(part) : absl::OkStatus();
  });
  return {all[1], all[3]};
}

TEST(Parts, DifferentEnginesAreNamedByTheirRanksInPartAndWorld) {
  for (const absl::Status& status : OfOddRanks([](World part) {
         const ToyModel model({.layers = 4 + part.rank()});
         return Engine::Create(part, Device::Cpu(1), model.spec(), Plain()).status();
       })) {
    EXPECT_THAT(status, Says("the model of rank 1 (world rank 3) differs from rank 0 (world rank "
                             "1)'s"));
  }
}

TEST(Parts, TheErrorOfARankNamesItInPartAndWorld) {
  const std::vector<absl::Status> statuses = OfOddRanks([](World part) -> absl::Status {
    ToyModel model({});
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(part, Device::Cpu(1), model.spec(), Plain()));
    return engine.Agree(part.rank() == 1 ? absl::DataLossError("a page is missing")
                                         : absl::OkStatus());
  });
  EXPECT_EQ(statuses[0], absl::DataLossError("rank 1 (world rank 3): a page is missing"));
  EXPECT_EQ(statuses[1], absl::DataLossError("a page is missing"));
}

TEST(Parts, ARankThatFailsItsPartIsNamedInPartAndWorld) {
  const std::vector<absl::Status> statuses = OfOddRanks([](World part) -> absl::Status {
    if (part.rank() == 0) part.Fail(absl::DataLossError("a page is missing"));
    return part.NewCommunicator({.timeout_seconds = 60}).status();
  });
  for (const absl::Status& status : statuses)
    EXPECT_EQ(status, absl::DataLossError("rank 0 (world rank 1) failed: a page is missing"));
}

TEST(Parts, DifferentCallsOfTheWorldNameWorldRanks) {
  OnThreads(2, [](World world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.Split(world.rank(), 0).status());
    const ToyModel model({});
    const absl::Status apart =
        world.rank() == 0 ? world.NewCommunicator().status()
                          : Engine::Create(world, Device::Cpu(1), model.spec(), Plain()).status();
    EXPECT_THAT(apart, Says("ranks do different things: world rank 1 "));
    EXPECT_THAT(apart, Says(" where world rank 0 "));
    return absl::OkStatus();
  });
}

TEST(Parts, ASkippedStepNamesTheRankInPartAndWorld) {
  ::testing::internal::CaptureStderr();
  OnThreads(4, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() % 2, world.rank()));
    Config config = Plain();
    config.ebb.check_overflow = true;
    ToyModel model({});
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(part, Device::Cpu(1), model.spec(), config));
    EBB_RETURN_IF_ERROR(model.Train(engine, part.rank(), 0, {}, /*blow_up=*/world.rank() == 1));
    return engine.Report().status();
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr(": rank 0 (world rank 1) has a non-finite "));
}

// Equal names are equal values, whatever the part.
TEST(Parts, NormalGivesThePartsEqualValuesUnlessTheirSeedsDiffer) {
  for (const bool own_seeds : {false, true}) {
    std::vector<std::vector<uint32_t>> bits(2);
    OnThreads(2, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank(), 0));
      ModelSpec model;
      const UnitId unit = model.AddUnit("layer");
      const uint64_t seed = own_seeds ? 1 + static_cast<uint64_t>(world.rank()) : 1;
      model.Add(unit, {.name = "w", .shape = {8}, .init = Normal(0.02f, seed)});
      model.forward.push_back({.unit = unit});
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(part, Device::Cpu(1), model, Plain()));
      EBB_ASSIGN_OR_RETURN(bits[static_cast<size_t>(world.rank())], MasterBits(engine, model));
      return absl::OkStatus();
    });
    EXPECT_EQ(bits[0] == bits[1], !own_seeds);
  }
}

}  // namespace
}  // namespace ebb::testing::parts_test
