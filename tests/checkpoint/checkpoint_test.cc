// A saved and loaded run goes on with the same bits, at any stage and tier of its world, whatever
// runs beside the save. An error names what has changed on the disk. Other worlds:
// resharding_test.cc.
#include "ebb/runtime/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/trace/log.h"
#include "own_folder.h"
#include "tests/offload/system_files.h"
#include "tests/offload/test_overrides.h"
#include "tests/status.h"
#include "way.h"

namespace ebb::testing::checkpoint_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

class CheckpointTest : public OwnFolderTest {};

const Way kWays[] = {{.world = 1, .stage = 0},
                     {.world = 2, .stage = 0},
                     {.world = 2, .stage = 1, .tier = Tier::kCpu},
                     {.world = 2, .stage = 2, .tier = Tier::kNvme},
                     {.world = 2, .stage = 3},
                     {.world = 2, .stage = 3, .tier = Tier::kCpu},
                     {.world = 2, .stage = 3, .tier = Tier::kNvme},
                     {.world = 2, .stage = 3, .prefetch_depth = 3, .coalesce_bytes = 1 << 20},
                     {.world = 3, .stage = 3},
                     {.world = 4, .stage = 3, .shard_group = 2}};

TEST_F(CheckpointTest, ResumesBitForBitAtAnyStageAndTierOfItsWorld) {
  for (const DType compute : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int world : {1, 2}) {
      const auto way_of = [&](Way way) {
        way.compute = compute;
        return way;
      };
      ParameterValues expected;
      OnWay(way_of({.world = world, .stage = 1}), [&](Engine& engine, ToyModel& model, int rank) {
        ASSERT_OK(Train(engine, model, rank, 0, 4));
        ASSERT_OK(KeepMasters(engine, model, rank, expected));
      });
      for (const Way& saver : kWays) {
        if (saver.world != world) continue;
        fs::remove_all(folder_);
        TrainAndSave(way_of(saver), 2, folder_);
        for (const Way& loader : kWays) {
          // Each pair of ways with one dtype, each way with all.
          const auto turn = &saver - kWays + (&loader - kWays) - static_cast<int>(compute);
          if (loader.world != world || (!Full() && world > 1 && turn % 3 != 0)) continue;
          OnWay(way_of(loader), [&](Engine& engine, ToyModel& model, int rank) {
            ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
            EXPECT_EQ(loaded.path, At(2));
            EXPECT_EQ(loaded.state.finished_steps, 2);
            ASSERT_OK(Train(engine, model, rank, 2, 4));
            SCOPED_TRACE(absl::StrCat("stage ", saver.stage, " tier ", static_cast<int>(saver.tier),
                                      " to stage ", loader.stage, " tier ",
                                      static_cast<int>(loader.tier), " world ", world));
            ExpectMasters(engine, model, expected);
          });
        }
      }
    }
  }
}

// The saved bytes do not depend on steps that run meanwhile. A second save waits for the first.
TEST_F(CheckpointTest, ASaveBesideStepsHasTheStateOfItsStep) {
  for (Way way : kWays) {
    way.compute = DType::kBFloat16;
    fs::remove_all(folder_);
    ParameterValues expected;
    OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
      ASSERT_OK(Train(engine, model, rank, 0, 2));
      ASSERT_OK_AND_ASSIGN(const SaveTicket second, SaveAsync(engine, folder_));
      ASSERT_OK(Train(engine, model, rank, 2, 3));
      ASSERT_OK_AND_ASSIGN(const SaveTicket third, SaveAsync(engine, folder_, {.keep = 2}));
      EXPECT_TRUE(second.Done());
      EXPECT_EQ(second.Wait().value_or("none"), At(2));
      ASSERT_OK(Train(engine, model, rank, 3, 4));
      EXPECT_EQ(third.Wait().value_or("none"), At(3));
      ASSERT_OK(KeepMasters(engine, model, rank, expected));
    });
    for (const int step : {2, 3}) {
      OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
        ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, At(step)));
        EXPECT_EQ(loaded.state.finished_steps, step);
        ASSERT_OK(Train(engine, model, rank, step, 4));
        ExpectMasters(engine, model, expected);
      });
    }
  }
}

// Steps and calls beside a save change neither the saved bytes nor a bit of the run that saves.
TEST_F(CheckpointTest, EvaluationsAccumulationAndSuspensionBesideASaveChangeNothing) {
  const Way kBeside[] = {
      {.world = 2, .stage = 3, .timing = Timing::kEarly},
      {.world = 2, .stage = 1, .tier = Tier::kCpu, .timing = Timing::kOff, .micro_batches = 2},
      {.world = 2,
       .stage = 3,
       .tier = Tier::kNvme,
       .compute = DType::kBFloat16,
       .micro_batches = 2,
       .warms_up = true},
      {.world = 1, .stage = 3, .tier = Tier::kNvme, .timing = Timing::kEarly, .warms_up = true},
      {.world = 2, .stage = 0, .compute = DType::kFloat16, .warms_up = true}};
  for (const Way& way : kBeside) {
    SCOPED_TRACE(absl::StrCat("stage ", way.stage, " tier ", static_cast<int>(way.tier)));
    fs::remove_all(folder_);
    ParameterValues expected;
    enum { kUnbroken, kSaves, kResumed };
    for (const int run : {kUnbroken, kSaves, kResumed}) {
      OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
        std::optional<SaveTicket> saving;
        if (run == kResumed) {
          ASSERT_OK(LoadCheckpoint(engine, folder_).status());
        } else {
          ASSERT_OK(Train(engine, model, rank, 0, 2));
        }
        if (run == kSaves) {
          ASSERT_OK_AND_ASSIGN(saving, SaveAsync(engine, folder_));
          ASSERT_OK(model.Evaluate(engine, rank, way.micro_batches).status());
        }
        ASSERT_OK(Train(engine, model, rank, 2, 3));
        if (run == kSaves) {
          ASSERT_OK(engine.Suspend());
          ASSERT_OK(engine.Resume());
          ASSERT_OK(model.Evaluate(engine, rank, way.micro_batches).status());
        }
        ASSERT_OK(Train(engine, model, rank, 3, 5));
        if (run == kSaves) ASSERT_OK(saving->Wait().status());
        ASSERT_OK_AND_ASSIGN(ParameterValues masters,
                             GatherAll(engine, model.spec(), StateClass::kMaster));
        if (rank != 0) return;
        if (run == kUnbroken) expected = masters;
        EXPECT_EQ(masters, expected) << (run == kSaves ? "saves" : "resumed");
      });
    }
  }
}

TEST_F(CheckpointTest, WithoutMastersTheParametersAreKeptAsTheyAre) {
  const Way way = {
      .world = 2, .stage = 3, .compute = DType::kBFloat16, .stochastic_rounding = true};
  ParameterValues expected;
  OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 4));
    ASSERT_OK_AND_ASSIGN(ParameterValues values,
                         GatherAll(engine, model.spec(), StateClass::kParameter));
    if (rank == 0) expected = std::move(values);
  });
  TrainAndSave(way, 2, folder_);
  OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(LoadCheckpoint(engine, folder_).status());
    ASSERT_OK(Train(engine, model, rank, 2, 4));
    ExpectMasters(engine, model, expected, StateClass::kParameter);
  });
}

std::string WarningsOfALoad(const std::string& folder, const Way& way) {
  std::string warnings;
  SendLogTo([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::kWarning) warnings += line;
  });
  OnWay(way,
        [&](Engine& engine, ToyModel&, int) { return LoadCheckpoint(engine, folder).status(); });
  SendLogTo({});
  return warnings;
}

TEST_F(CheckpointTest, WarnsOfKeysThatChangeTheBitsOfTheSavedRun) {
  const Way saver = {.world = 2,
                     .stage = 1,
                     .compute = DType::kBFloat16,
                     .timing = Timing::kOff,
                     .micro_batches = 2};
  TrainAndSave(saver, 0, folder_);
  const auto warned = [&](const Way& loader) { return WarningsOfALoad(folder_, loader); };
  EXPECT_THAT(warned(saver), Not(HasSubstr("had another")));
  Way other = saver;
  other.reduce_at = ReduceAt::kStep;
  EXPECT_THAT(warned(other), HasSubstr("had another ebb.reduce_at"));
  other.compute = DType::kFloat32;
  EXPECT_THAT(warned(other), HasSubstr("had another dtype, ebb.reduce_at:"));
  // The tiers of state do not change the result. The learning rate does.
  other = saver;
  other.stage = 3;
  other.tier = Tier::kCpu;
  EXPECT_THAT(warned(other), Not(HasSubstr("had another")));
  other.warms_up = true;
  EXPECT_THAT(warned(other), AllOf(HasSubstr("had another scheduler.params.warmup_max_lr, "),
                                   HasSubstr(", scheduler.type:")));
}

TEST_F(CheckpointTest, TheLogSaysWhatBecomesOfStatesOfOtherBits) {
  const auto said = [&](OptimizerStates saved, OptimizerStates loaded) {
    Way way = {.world = 2, .stage = 1, .states = saved};
    const std::string folder =
        folder_ + absl::StrCat("/", static_cast<int>(saved), static_cast<int>(loaded));
    TrainAndSave(way, 1, folder);
    std::string lines;
    SendLogTo([&](LogLevel, std::string_view line) { lines += line; });
    way.states = loaded;
    OnWay(way,
          [&](Engine& engine, ToyModel&, int) { return LoadCheckpoint(engine, folder).status(); });
    SendLogTo({});
    return lines;
  };
  using enum OptimizerStates;
  EXPECT_THAT(said(kFloat32, k8Bit), HasSubstr("optimizer states are rounded to this run's"));
  EXPECT_THAT(said(k8Bit, kFloat32), HasSubstr("optimizer states were saved in 8 bits"));
  EXPECT_THAT(said(kBFloat16, kFloat32), HasSubstr("optimizer states were saved in bf16"));
  EXPECT_THAT(said(k8Bit, k8Bit),
              Not(AnyOf(HasSubstr("states are rounded"), HasSubstr("states were saved"))));
}

// One part is two steps behind. Neither part's load can know it, so the log says both.
TEST_F(CheckpointTest, TheLogNamesTheStepOfEachPartOfAWorld) {
  const Way way = {.world = 2, .stage = 1};
  const auto on_parts = [&](const WayBody& body) {
    return RunThreads(2 * way.world, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() % 2, world.rank()));
      return RunRank(part, way,
                     [&, number = world.rank() % 2](Engine& engine, ToyModel& model, int) {
                       return body(engine, model, number);
                     });
    });
  };
  const auto folder = [&](int part) { return absl::StrCat(folder_, "/part", part); };
  fs::create_directories(folder_);
  ASSERT_EQ(on_parts([&](Engine& engine, ToyModel& model, int part) -> absl::Status {
              EBB_RETURN_IF_ERROR(Train(engine, model, engine.world().rank(), 0, 2 + 2 * part));
              return SaveCheckpoint(engine, folder(part)).status();
            }),
            absl::OkStatus());
  std::string lines;
  SendLogTo([&](LogLevel, std::string_view line) { lines.append(line).append("\n"); });
  EXPECT_EQ(on_parts([&](Engine& engine, ToyModel&, int part) {
              return LoadCheckpoint(engine, folder(part)).status();
            }),
            absl::OkStatus());
  SendLogTo({});
  EXPECT_THAT(lines, HasSubstr("the part of the world with rank 0 goes on from step 2 ('" +
                               folder(0) + "/step-000000002')"));
  EXPECT_THAT(lines,
              HasSubstr("the part of the world with rank 0 (world rank 1) goes on from step 4 ('" +
                        folder(1) + "/step-000000004')"));
}

// Without the key the group is the ranks of a host, so the same ranks on other hosts have another
// one.
TEST_F(CheckpointTest, WarnsOfAnotherReductionGroupAlsoIfNoKeyHasChanged) {
  const auto save = [&](const Way& way) {
    fs::remove_all(folder_);
    TrainAndSave(way, 0, folder_);
  };
  const Way of_host = {.world = 4, .stage = 3};
  const auto with = [&](int group) {
    Way way = of_host;
    way.reduction_group = group;
    return way;
  };
  save(with(2));
  EXPECT_THAT(WarningsOfALoad(folder_, of_host),
              HasSubstr("had another ebb.reduction_group (2, now 4"));
  EXPECT_EQ(WarningsOfALoad(folder_, with(2)), "");
  // Another number of ranks has other bits in any case, and groups of one rank those of all.
  EXPECT_THAT(WarningsOfALoad(folder_, {.world = 2, .stage = 3}),
              Not(HasSubstr("reduction_group")));
  save(of_host);
  EXPECT_EQ(WarningsOfALoad(folder_, of_host) + WarningsOfALoad(folder_, with(1)), "");
  EXPECT_THAT(WarningsOfALoad(folder_, {.world = 4, .stage = 3, .shard_group = 2}),
              HasSubstr("had another ebb.reduction_group (4, now 2"));
  // An older version's does not say which it had.
  Manifest older = *ReadManifest(At(0));
  older.reduction_group = 0;
  ASSERT_OK(ReplaceFile(At(0) + "/" + kManifestName, ToText(older)));
  EXPECT_EQ(WarningsOfALoad(folder_, with(2)), "");
}

TEST_F(CheckpointTest, ARunThatGoesOnRemovesItsOwnOldOnesAlone) {
  const auto run = [&](int from, int to, bool resumes) {
    return RunWay({.world = 2, .stage = 3},
                  [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                    if (resumes) EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
                    for (int step = from; step < to; ++step) {
                      EBB_RETURN_IF_ERROR(Train(engine, model, rank, step, step + 1));
                      if (step + 1 < to && !resumes) continue;
                      EBB_RETURN_IF_ERROR(SaveCheckpoint(engine, folder_, {.keep = 1}).status());
                    }
                    return absl::OkStatus();
                  });
  };
  ASSERT_EQ(run(0, 1, /*resumes=*/false), absl::OkStatus());  // step 1 of a run
  ASSERT_EQ(run(0, 3, /*resumes=*/false), absl::OkStatus());  // step 3 of another one
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000003", "step-000000001"));
  ASSERT_EQ(run(3, 5, /*resumes=*/true), absl::OkStatus());  // the other one goes on
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000005", "step-000000001"));
  EXPECT_THAT(run(0, 5, /*resumes=*/false), Says("is of another run"));
}

TEST_F(CheckpointTest, ForksOfOneCheckpointKeepTheirOwn) {
  const std::string forks = folder_ + "/forks";
  const auto run = [&](int from, int to, const std::string& folder) {
    return RunWay({.world = 2, .stage = 3},
                  [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                    if (from > 0) EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
                    EBB_RETURN_IF_ERROR(CheckSaves(engine, folder, to));
                    EBB_RETURN_IF_ERROR(Train(engine, model, rank, from, to));
                    return SaveCheckpoint(engine, folder, {.keep = 1}).status();
                  });
  };
  ASSERT_EQ(run(0, 1, folder_), absl::OkStatus());
  ASSERT_EQ(run(1, 2, forks), absl::OkStatus());
  // A run that goes on there has to load before it asks.
  OnWay({.world = 2, .stage = 3}, [&](Engine& engine, ToyModel&, int) {
    EXPECT_THAT(CheckSaves(engine, forks, 3),
                Says("loads it first (LoadCheckpoint, then CheckSaves"));
    ASSERT_OK(LoadCheckpoint(engine, forks).status());
    ASSERT_OK(CheckSaves(engine, forks, 3));
  });
  EXPECT_THAT(run(1, 3, forks), Says("step-000000002' is of another run"));
  fs::rename(forks + "/step-000000002", forks + "/step-000000004");
  ASSERT_EQ(run(1, 3, forks), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(forks), ElementsAre("step-000000004", "step-000000003"));
}

TEST_F(CheckpointTest, TheTrainersOwnBytesComeBack) {
  const std::string bytes("\0\x01\xff", 3);
  OnWay({.world = 2, .stage = 1}, [&](Engine& engine, ToyModel&, int rank) {
    return SaveCheckpoint(engine, folder_,
                          {.trainer = {{"place", rank == 0 ? bytes : "of another rank"}},
                           .of_this_rank = {{"random", absl::StrCat("rank ", rank)}}})
        .status();
  });
  for (const int world : {1, 2}) {
    OnWay({.world = world, .stage = 1}, [&](Engine& engine, ToyModel&, int rank) {
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_EQ(loaded.trainer.at("place"), bytes);
      EXPECT_EQ(loaded.ranks, 2);
      if (world == 2) {
        EXPECT_EQ(loaded.of_this_rank.at("random"), absl::StrCat("rank ", rank));
      } else {
        EXPECT_TRUE(loaded.of_this_rank.empty());
      }
    });
  }
}

constexpr char kFile[] = "/rank-00001-of-00002.safetensors", kManifest[] = "/manifest.json";

// The errors of a load on all ranks, after `change` of the files.
absl::Status LoadAfter(const std::string& folder, const Damage& change, const ModelSpec& model,
                       const LoadOptions& options = {}) {
  const Way way = {.world = 2, .stage = 3};
  fs::remove_all(folder);
  TrainAndSave(way, 1, folder);
  change(folder + "/step-000000001");
  absl::Status statuses[2];
  EBB_RETURN_IF_ERROR(RunThreads(way.world, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model, ConfigOf(way)));
    statuses[world.rank()] = LoadCheckpoint(engine, folder, options).status();
    return absl::OkStatus();
  }));
  EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << statuses[1];
  return statuses[0];
}

TEST_F(CheckpointTest, NamesAChangedFileOnEveryRank) {
  const ModelSpec model = ToyModel({.groups = true}).spec();
  struct Change {
    const char* what;
    Damage run;
    std::vector<const char*> said;
  };
  const Change kChanges[] = {
      {"nothing", [](const std::string&) {}, {}},
      {"a bit of the data", Flips(kFile, 4096 + 100), {"rank-00001", "checksum"}},
      {"the last byte", Flips(kFile, -1), {"rank-00001", "checksum"}},
      {"a bit of the header", Flips(kFile, 200), {"rank-00001"}},
      {"a cut file", Cuts(kFile, 5000), {"rank-00001"}},
      {"an empty file", Cuts(kFile, 0), {"rank-00001"}},
      {"a missing file", Removes(kFile), {"rank-00001"}},
      {"a link",
       [](const std::string& at) {
         fs::rename(at + kFile, at + "/elsewhere");
         fs::create_symlink(at + "/elsewhere", at + kFile);
       },
       {"rank-00001", "link"}},
      {"files of two ranks in each other's place",
       [](const std::string& at) {
         fs::rename(at + kFile, at + "/other");
         fs::rename(at + "/rank-00000-of-00002.safetensors", at + kFile);
         fs::rename(at + "/other", at + "/rank-00000-of-00002.safetensors");
       },
       {"rank-0000"}},
      {"a bit of the manifest", Flips(kManifest, 300), {"manifest.json"}},
  };
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.what);
    const absl::Status status = LoadAfter(folder_, change.run, model);
    EXPECT_EQ(status.ok(), change.said.empty()) << status;
    for (const char* said : change.said) EXPECT_THAT(status, Says(said));
  }
}

TEST_F(CheckpointTest, AModelThatDoesNotFitIsNamed) {
  const auto nothing = [](const std::string&) {};
  ModelSpec more = ToyModel({.groups = true}).spec();
  more.Add(UnitId{0}, {.name = "new", .shape = {3}, .init = Constant(7)});
  EXPECT_THAT(LoadAfter(folder_, nothing, more),
              Says("it lacks the parameter 'new'", "LoadOptions::partial"));
  EXPECT_EQ(LoadAfter(folder_, nothing, more, {.partial = true}), absl::OkStatus());

  ModelSpec other = ToyModel({.groups = true}).spec();
  other.parameters[0].name = "renamed";
  EXPECT_THAT(LoadAfter(folder_, nothing, other),
              Says("lacks the parameter 'renamed'", "which the model lacks"));

  ModelSpec wider = ToyModel({.width = 14, .groups = true}).spec();
  EXPECT_THAT(LoadAfter(folder_, nothing, wider, {.partial = true}), Says("has the shape"));
}

TEST_F(CheckpointTest, AnErrorOfOneRankIsEveryRanksAndTheOlderOneStays) {
  absl::Status statuses[2];
  OnWay({.world = 2, .stage = 3}, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(model.Train(engine, rank, 0, {}));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
    ASSERT_OK(model.Train(engine, rank, 1, {}));
    statuses[rank] = SaveCheckpoint(engine, rank == 0 ? folder_ : folder_ + "/nowhere").status();
    ASSERT_OK(model.Train(engine, rank, 2, {}));
  });
  EXPECT_THAT(statuses, Each(Says("nowhere/.saving-step-000000002")));
  ASSERT_OK_AND_ASSIGN(const auto left, CheckpointsIn(folder_));
  EXPECT_THAT(left, ElementsAre("step-000000001"));
  EXPECT_FALSE(fs::exists(folder_ + "/.saving-step-000000002"));
}

TEST_F(CheckpointTest, ASaveForWhichTheHostHasNoMemoryIsRefusedBeforeTraining) {
  const SystemFiles files;
  files.Memory(/*available_kib=*/2 * 30 * 1024, /*swap_kib=*/0);
  TestOverrides().system_root = files.root();
  OnWay({.world = 2, .stage = 3}, [&](Engine& engine, ToyModel&, int) {
    EXPECT_THAT(CheckSaves(engine, folder_, 1),
                StatusIs(absl::StatusCode::kResourceExhausted, "a save: 32.0 MiB"));
  });
  TestOverrides() = {};
}

}  // namespace
}  // namespace ebb::testing::checkpoint_test
