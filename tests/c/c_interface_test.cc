// The C interface as a caller of another language meets it: mistakes end in a code and a text,
// memory outlives the engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "ebb/runtime/c/ebb.h"

namespace {

using ::testing::HasSubstr;

constexpr char kConfig[] =
    R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})";

template <class T>
T Sized() {
  T made{};
  made.struct_size = sizeof(T);
  return made;
}

class CInterface : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(ebb_world_open(nullptr, &world_), EBB_OK) << ebb_error(); }
  void TearDown() override {
    ebb_engine_destroy(engine_);
    ebb_model_destroy(model_);
    ebb_world_close(world_);
  }

  // `units` of one weight each, 4 elements that count from 0, visited in turn.
  void MakeModel(int units) {
    model_ = ebb_model_create();
    for (int u = 0; u < units; ++u) {
      const std::string name = "unit" + std::to_string(u), weight = "w" + std::to_string(u);
      ASSERT_EQ(ebb_model_add_unit(model_, name.c_str(), 0), u);
      const int64_t shape[] = {2, 2};
      auto parameter = Sized<ebb_parameter>();
      parameter.trainable = 1;
      parameter.name = weight.c_str();
      parameter.shape = shape;
      parameter.dimensions = 2;
      parameter.source = values_;
      ASSERT_EQ(ebb_model_add_parameter(model_, u, &parameter), u) << ebb_error();
      ebb_visit visit = {sizeof visit, u, 1, 1, 1};
      ASSERT_EQ(ebb_model_add_visit(model_, &visit), u);
    }
  }
  void MakeEngine(int units) {
    MakeModel(units);
    ASSERT_EQ(ebb_engine_create(world_, model_, kConfig, nullptr, &engine_), EBB_OK) << ebb_error();
  }
  void Refuses(int32_t answer, const std::string& text, int32_t code = EBB_INVALID_ARGUMENT) {
    EXPECT_EQ(answer, code);
    EXPECT_THAT(ebb_error(), HasSubstr(text));
  }
  // Every gradient is 1.
  void Backward(int unit) {
    int64_t scope = 0;
    ASSERT_EQ(ebb_scope_open(engine_, EBB_BACKWARD, unit, &scope), EBB_OK) << ebb_error();
    ebb_gradient gradient;
    ASSERT_EQ(ebb_scope_gradients(engine_, scope, &unit, 1, &gradient), EBB_OK) << ebb_error();
    ASSERT_EQ(gradient.elements, 4);
    EXPECT_EQ(gradient.first, 1);
    std::fill_n(static_cast<float*>(gradient.data), 4, 1.0f);
    ASSERT_EQ(ebb_scope_close(engine_, scope), EBB_OK);
  }
  void Forward(int unit) {
    int64_t scope = 0;
    ASSERT_EQ(ebb_scope_open(engine_, EBB_FORWARD, unit, &scope), EBB_OK) << ebb_error();
    ASSERT_EQ(ebb_scope_close(engine_, scope), EBB_OK);
  }
  // Visits the first unit alone.
  void TakeStep(const ebb_step_options* options = nullptr) {
    ASSERT_EQ(ebb_step_begin(engine_, options), EBB_OK) << ebb_error();
    Forward(0);
    Backward(0);
    ASSERT_EQ(ebb_step_finish(engine_, nullptr), EBB_OK) << ebb_error();
  }
  std::vector<float> Gathered(int parameter) {
    std::vector<float> whole;
    const ebb_sink append = [](void* user, int32_t, int64_t begin, int64_t end,
                               const float* values) -> int32_t {
      auto& to = *static_cast<std::vector<float>*>(user);
      to.insert(to.end(), values, values + (end - begin));
      return 0;
    };
    EXPECT_EQ(ebb_gather(engine_, parameter, EBB_MASTER, -1, append, &whole), EBB_OK)
        << ebb_error();
    return whole;
  }

  float values_[4] = {0, 1, 2, 3};
  ebb_world* world_ = nullptr;
  ebb_model* model_ = nullptr;
  ebb_engine* engine_ = nullptr;
};

TEST_F(CInterface, AStepUpdatesEveryParameter) {
  MakeEngine(2);
  std::fill_n(values_, 4, -1.0f);  // read while the engine was made, and no more
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  for (int unit : {0, 1}) Forward(unit);
  const float loss = 7;
  ASSERT_EQ(ebb_add_loss(engine_, &loss), EBB_OK);
  for (int unit : {1, 0}) Backward(unit);
  ASSERT_EQ(ebb_step_finish(engine_, nullptr), EBB_OK) << ebb_error();
  auto report = Sized<ebb_report>();
  ASSERT_EQ(ebb_step_report(engine_, &report), EBB_OK) << ebb_error();
  EXPECT_EQ(report.applied, 1);
  EXPECT_EQ(report.step, 1);
  EXPECT_EQ(report.loss, 7);
  EXPECT_NEAR(report.gradient_norm, std::sqrt(8.0), 1e-6);
  for (int parameter : {0, 1})
    EXPECT_EQ(Gathered(parameter), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
}

TEST_F(CInterface, AUnitThatIsWholeHasItsValuesBetweenSteps) {
  MakeEngine(1);
  ebb_view view;
  int32_t count = 0, is_whole = 0;
  ASSERT_EQ(ebb_engine_views(engine_, 0, &view, 1, &count), EBB_OK) << ebb_error();
  TakeStep();
  ASSERT_EQ(ebb_engine_await_whole(engine_, 0, &is_whole), EBB_OK) << ebb_error();
  EXPECT_EQ(is_whole, 1);
  const auto* const values = static_cast<const float*>(view.data);
  EXPECT_EQ(std::vector<float>(values, values + 4), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
  Refuses(ebb_engine_await_whole(engine_, 0, nullptr), "is_whole");
  Refuses(ebb_engine_await_whole(engine_, 7, &is_whole), "unit 7");
  Refuses(ebb_engine_await_whole(nullptr, 0, &is_whole), "");
}

// Adds what it is told to: master - rate x (gradient + the gradients before).
int32_t Accumulated(void* user, const ebb_update_slice* slice) {
  static_cast<std::vector<int64_t>*>(user)->push_back(slice->step);
  if (slice->states != 1 || slice->stream != nullptr) return 1;
  if (slice->step > 2) return 1;
  for (int64_t i = 0; i < slice->end - slice->begin; ++i) {
    slice->state[0][i] += slice->gradient[i];
    slice->master[i] -= static_cast<float>(slice->learning_rate) * slice->state[0][i];
  }
  return 0;
}

TEST_F(CInterface, TheCallersOptimizerUpdatesSlices) {
  MakeModel(1);
  std::vector<int64_t> steps;
  const char* const names[] = {"sum"};
  auto options = Sized<ebb_engine_options>();
  options.update = Accumulated;
  options.update_user = &steps;
  options.update_states = names;
  options.update_state_count = 1;
  constexpr char kPlain[] = R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0})";
  ASSERT_EQ(ebb_engine_create(world_, model_, kPlain, &options, &engine_), EBB_OK) << ebb_error();
  ebb_group_options rate = Sized<ebb_group_options>();
  rate.has_learning_rate = 1;
  rate.learning_rate = 0.25;
  auto step = Sized<ebb_step_options>();
  step.groups = &rate;
  step.group_count = 1;
  for (int number = 0; number < 2; ++number) TakeStep(&step);
  EXPECT_EQ(Gathered(0), (std::vector<float>{-0.75f, 0.25f, 1.25f, 2.25f}));
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2}));
  std::vector<float> sums;
  const ebb_sink append = [](void* user, int32_t, int64_t begin, int64_t end,
                             const float* values) -> int32_t {
    static_cast<std::vector<float>*>(user)->assign(values, values + (end - begin));
    return 0;
  };
  ASSERT_EQ(ebb_gather_state(engine_, 0, EBB_OPTIMIZER, "sum", -1, append, &sums), EBB_OK)
      << ebb_error();
  EXPECT_EQ(sums, (std::vector<float>(4, 2.0f)));
  ASSERT_EQ(ebb_step_begin(engine_, &step), EBB_OK) << ebb_error();
  Forward(0);
  Backward(0);
  (void)ebb_step_finish(engine_, nullptr);  // the update may have failed by then
  EXPECT_NE(ebb_gather(engine_, 0, EBB_MASTER, -1, append, &sums), EBB_OK);
  EXPECT_THAT(ebb_error(), HasSubstr("the caller's optimizer failed at parameter 0 in step 3"));
  options.update_states = nullptr;
  ebb_engine* refused = nullptr;
  Refuses(ebb_engine_create(world_, model_, kPlain, &options, &refused), "update_states");
}

TEST_F(CInterface, InitialValuesThatAreNanAreAnErrorThatNamesTheParameter) {
  MakeModel(2);
  values_[2] = std::numeric_limits<float>::quiet_NaN();
  Refuses(ebb_engine_create(world_, model_, kConfig, nullptr, &engine_),
          "'w0' are NaN, 1 of the 4");
}

TEST_F(CInterface, TheScheduledRateIsThatOfTheNextUpdate) {
  MakeModel(1);
  const char* const config =
      R"({"train_micro_batch_size_per_gpu": 1,
          "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
          "scheduler": {"type": "LRRangeTest",
                        "params": {"lr_range_test_min_lr": 0.25, "lr_range_test_step_size": 1}}})";
  ASSERT_EQ(ebb_engine_create(world_, model_, config, nullptr, &engine_), EBB_OK) << ebb_error();
  for (double expected : {0.25, 0.5, 0.75}) {
    double rate = 0;
    ASSERT_EQ(ebb_scheduled_rate(engine_, nullptr, &rate), EBB_OK) << ebb_error();
    EXPECT_EQ(rate, expected);
    TakeStep();
    auto report = Sized<ebb_report>();
    ASSERT_EQ(ebb_step_report(engine_, &report), EBB_OK) << ebb_error();
    EXPECT_EQ(report.learning_rate, expected);
  }
  double rate = 0;
  Refuses(ebb_scheduled_rate(engine_, "biases", &rate), "group 'biases'", EBB_NOT_FOUND);
}

TEST_F(CInterface, AUnitShowsEachParameterInItsDType) {
  model_ = ebb_model_create();
  ASSERT_EQ(ebb_model_add_unit(model_, "unit", 0), 0);
  const uint8_t bytes[] = {0, 7, 128, 255};
  const int64_t shape[] = {4};
  const auto add = [&](const char* name, int32_t dtype, bool trainable, const void* source,
                       int32_t source_dtype) {
    auto parameter = Sized<ebb_parameter>();
    parameter.trainable = trainable ? 1 : 0;
    parameter.name = name;
    parameter.shape = shape;
    parameter.dimensions = 1;
    parameter.source = source;
    parameter.source_dtype = source_dtype;
    parameter.has_dtype = 1;
    parameter.dtype = dtype;
    return ebb_model_add_parameter(model_, 0, &parameter);
  };
  ASSERT_EQ(add("base", EBB_INT8, false, bytes, EBB_INT8), 0) << ebb_error();
  ASSERT_EQ(add("adapter", EBB_BF16, true, values_, EBB_FP32), 1) << ebb_error();
  ASSERT_EQ(add("norm", EBB_FP32, true, values_, EBB_FP32), 2) << ebb_error();
  ebb_visit visit = {sizeof visit, 0, 1, 1, 1};
  ASSERT_EQ(ebb_model_add_visit(model_, &visit), 0);
  ASSERT_EQ(ebb_engine_create(world_, model_, kConfig, nullptr, &engine_), EBB_OK) << ebb_error();
  ebb_view views[3];
  int32_t count = 0;
  ASSERT_EQ(ebb_engine_views(engine_, 0, views, 3, &count), EBB_OK) << ebb_error();
  ASSERT_EQ(count, 3);
  EXPECT_EQ(views[0].dtype, EBB_INT8);
  EXPECT_EQ(views[0].gradient_dtype, -1);
  EXPECT_EQ(views[1].dtype, EBB_BF16);
  EXPECT_EQ(views[2].dtype, EBB_FP32);
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  Forward(0);
  int64_t scope = 0;
  ASSERT_EQ(ebb_scope_open(engine_, EBB_BACKWARD, 0, &scope), EBB_OK);
  EXPECT_EQ(std::memcmp(views[0].data, bytes, sizeof bytes), 0);
  const int32_t trained[] = {1, 2};
  ebb_gradient gradients[2];
  ASSERT_EQ(ebb_scope_gradients(engine_, scope, trained, 2, gradients), EBB_OK) << ebb_error();
  EXPECT_EQ(gradients[0].dtype, EBB_BF16);
  EXPECT_EQ(gradients[1].dtype, EBB_FP32);
  std::fill_n(static_cast<float*>(gradients[1].data), 4, 1.0f);
  std::memset(gradients[0].data, 0, 4 * sizeof(uint16_t));
  ASSERT_EQ(ebb_scope_close(engine_, scope), EBB_OK);
  ASSERT_EQ(ebb_step_finish(engine_, nullptr), EBB_OK) << ebb_error();
  EXPECT_EQ(Gathered(0), (std::vector<float>{0, 7, 128, 255}));
  EXPECT_EQ(Gathered(2), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
  // Behind the unit are its parts, one of each other dtype, which are not the caller's.
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  EXPECT_EQ(ebb_scope_open(engine_, EBB_FORWARD, 1, &scope), EBB_INVALID_ARGUMENT);
  EXPECT_STREQ(ebb_error(), "unit 1 is not of the model, which has 1");
  ASSERT_EQ(ebb_step_drop(engine_), EBB_OK);
}

TEST_F(CInterface, RatesAreGivenForOneStep) {
  MakeEngine(1);
  auto rates = Sized<ebb_group_options>();
  rates.has_learning_rate = 1;
  rates.learning_rate = 2;
  auto options = Sized<ebb_step_options>();
  options.groups = &rates;
  options.group_count = 1;
  TakeStep(&options);
  EXPECT_EQ(Gathered(0), (std::vector<float>{-2, -1, 0, 1}));
}

TEST_F(CInterface, OptionsOfZerosAreTheDefaults) {
  MakeEngine(1);
  auto rates = Sized<ebb_group_options>();
  auto options = Sized<ebb_step_options>();
  options.groups = &rates;
  options.group_count = 1;
  TakeStep(&options);
  EXPECT_EQ(Gathered(0), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
  options.has_learning_rate = 1;  // 0 is a rate that can be given
  TakeStep(&options);
  EXPECT_EQ(Gathered(0), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
}

TEST_F(CInterface, ElementsOfAnArrayHaveOneSize) {
  MakeEngine(1);
  ebb_group_options rates[2] = {Sized<ebb_group_options>(), Sized<ebb_group_options>()};
  rates[1].struct_size = 8;
  auto options = Sized<ebb_step_options>();
  options.groups = rates;
  options.group_count = 2;
  Refuses(ebb_step_begin(engine_, &options), "ebb_group_options 1 is 8");
  options.groups = nullptr;
  Refuses(ebb_step_begin(engine_, &options), "ebb_group_options is null, but its number is 2");
}

TEST_F(CInterface, ADroppedStepLeavesNothing) {
  MakeEngine(2);
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  Forward(0);
  Forward(1);
  Backward(1);
  EXPECT_EQ(ebb_step_begin(engine_, nullptr), EBB_FAILED_PRECONDITION);
  ASSERT_EQ(ebb_step_drop(engine_), EBB_OK);
  EXPECT_EQ(Gathered(1), (std::vector<float>{0, 1, 2, 3}));
}

TEST_F(CInterface, AnEvaluationHasTheMeanOfItsLosses) {
  MakeEngine(1);
  ASSERT_EQ(ebb_evaluation_begin(engine_), EBB_OK);
  int64_t scope = 0;
  EXPECT_EQ(ebb_scope_open(engine_, EBB_BACKWARD, 0, &scope), EBB_FAILED_PRECONDITION);
  for (const float loss : {1.0f, 3.0f}) {
    Forward(0);
    ASSERT_EQ(ebb_add_loss(engine_, &loss), EBB_OK);
  }
  double mean = 0;
  ASSERT_EQ(ebb_evaluation_finish(engine_, &mean), EBB_OK) << ebb_error();
  EXPECT_EQ(mean, 2);
}

TEST_F(CInterface, AnEvaluationEndsWithTheTrainersError) {
  MakeEngine(1);
  for (const char* error : {"no batch", static_cast<const char*>(nullptr)}) {
    ASSERT_EQ(ebb_evaluation_begin(engine_), EBB_OK);
    EXPECT_EQ(ebb_engine_agree(engine_, error), error ? EBB_FAILED_PRECONDITION : EBB_OK);
    Refuses(ebb_evaluation_finish(engine_, nullptr), "no evaluation is open",
            EBB_FAILED_PRECONDITION);
  }
}

TEST_F(CInterface, ADeclaredOrderMayNestScopes) {
  MakeModel(2);
  const ebb_event events[] = {{1, EBB_FORWARD, 0},  {1, EBB_FORWARD, 1},  {0, EBB_FORWARD, 1},
                              {0, EBB_FORWARD, 0},  {1, EBB_BACKWARD, 0}, {1, EBB_BACKWARD, 1},
                              {0, EBB_BACKWARD, 1}, {0, EBB_BACKWARD, 0}};
  ASSERT_EQ(ebb_model_set_order(model_, events, 8), EBB_OK);
  ASSERT_EQ(ebb_engine_create(world_, model_, kConfig, nullptr, &engine_), EBB_OK) << ebb_error();
  const ebb_event wrong[] = {{1, 7, 0}};
  EXPECT_EQ(ebb_model_set_order(model_, wrong, 1), EBB_INVALID_ARGUMENT);
}

TEST_F(CInterface, AnEngineTakesAnotherOrder) {
  MakeEngine(2);
  const ebb_visit visits[] = {{sizeof(ebb_visit), 1, 1, 1, 1}, {sizeof(ebb_visit), 0, 1, 1, 1}};
  ASSERT_EQ(ebb_engine_reorder(engine_, visits, 2, nullptr, 0), EBB_OK) << ebb_error();
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  for (int unit : {1, 0}) Forward(unit);
  for (int unit : {0, 1}) Backward(unit);
  EXPECT_EQ(ebb_engine_reorder(engine_, visits, 2, nullptr, 0), EBB_FAILED_PRECONDITION);
  ASSERT_EQ(ebb_step_finish(engine_, nullptr), EBB_OK) << ebb_error();
  EXPECT_EQ(Gathered(0), (std::vector<float>{-0.5f, 0.5f, 1.5f, 2.5f}));
  EXPECT_EQ(ebb_engine_reorder(engine_, visits, 1, nullptr, 0), EBB_INVALID_ARGUMENT);
}

TEST_F(CInterface, AnErrorOfOneRankIsThatOfTheCallOnAll) {
  MakeEngine(1);
  EXPECT_EQ(ebb_engine_agree(engine_, nullptr), EBB_OK) << ebb_error();
  EXPECT_EQ(ebb_engine_agree(engine_, "the disk is full"), EBB_FAILED_PRECONDITION);
  EXPECT_STREQ(ebb_error(), "the disk is full");
}

TEST_F(CInterface, MemoryOutlivesAClosedEngine) {
  MakeEngine(1);
  ebb_view view;
  int32_t count = 0;
  ASSERT_EQ(ebb_engine_views(engine_, 0, &view, 1, &count), EBB_OK) << ebb_error();
  EXPECT_EQ(count, 1);
  EXPECT_EQ(view.elements, 4);
  EXPECT_EQ(view.dtype, EBB_FP32);
  EXPECT_EQ(view.gradient_dtype, EBB_FP32);
  ASSERT_EQ(ebb_engine_close(engine_), EBB_OK) << ebb_error();
  ASSERT_EQ(ebb_engine_close(engine_), EBB_OK);
  std::fill_n(static_cast<float*>(view.data), 4, 5.0f);
  Refuses(ebb_step_begin(engine_, nullptr), "closed", EBB_FAILED_PRECONDITION);
}

TEST_F(CInterface, StateIsWrittenAndReadBack) {
  MakeEngine(2);
  const ebb_fill fill = [](void*, int32_t parameter, int64_t begin, int64_t end,
                           float* values) -> int32_t {
    for (int64_t i = begin; i < end; ++i)
      values[i - begin] = static_cast<float>(100 * parameter + static_cast<int>(i));
    return 0;
  };
  ASSERT_EQ(ebb_write(engine_, EBB_MASTER, nullptr, fill, nullptr), EBB_OK) << ebb_error();
  EXPECT_EQ(Gathered(1), (std::vector<float>{100, 101, 102, 103}));
  const ebb_sink refuse = [](void*, int32_t, int64_t, int64_t, const float*) { return 1; };
  Refuses(ebb_read(engine_, EBB_MASTER, nullptr, refuse, nullptr), "w0", EBB_ABORTED);
  EXPECT_EQ(ebb_read(engine_, EBB_STAGING, nullptr, refuse, nullptr), EBB_INVALID_ARGUMENT);
}

TEST_F(CInterface, AStateOfOneParameterIsWrittenAndGathered) {
  MakeEngine(2);
  const ebb_fill nines = [](void*, int32_t, int64_t begin, int64_t end, float* values) -> int32_t {
    std::fill_n(values, end - begin, 9.0f);
    return 0;
  };
  const ebb_sink append = [](void* user, int32_t, int64_t begin, int64_t end, const float* values) {
    auto& to = *static_cast<std::vector<float>*>(user);
    to.insert(to.end(), values, values + (end - begin));
    return 0;
  };
  const std::vector<float> before = Gathered(0);
  ASSERT_EQ(ebb_write_parameter(engine_, 1, EBB_MASTER, nullptr, nines, nullptr), EBB_OK);
  std::vector<float> gathered, read;
  ASSERT_EQ(ebb_gather_state(engine_, 1, EBB_MASTER, nullptr, -1, append, &gathered), EBB_OK);
  ASSERT_EQ(ebb_read_parameter(engine_, 1, EBB_MASTER, nullptr, append, &read), EBB_OK);
  EXPECT_EQ(gathered, std::vector<float>(4, 9.0f));
  EXPECT_EQ(read, gathered);
  EXPECT_EQ(Gathered(0), before);
  Refuses(ebb_write_parameter(engine_, 7, EBB_MASTER, nullptr, nines, nullptr),
          "parameter 7: the model has 2");
  Refuses(ebb_gather_state(engine_, 1, EBB_OPTIMIZER, "velocity", -1, append, nullptr),
          "no state 'velocity'");
  Refuses(ebb_gather_state(engine_, 1, EBB_GRADIENT, nullptr, -1, append, nullptr),
          "between Step::Reduce and Step::Finish only", EBB_FAILED_PRECONDITION);
}

TEST_F(CInterface, TensorsOfOtherFilesAreImported) {
  const std::string folder = ::testing::TempDir() + "c_interface_import";
  std::filesystem::remove_all(folder);
  Refuses(ebb_import_tensors(R"({"error": "it is damaged", "code": "DATA_LOSS"})", folder.c_str()),
          "it is damaged", EBB_DATA_LOSS);
  Refuses(ebb_import_tensors("{}", folder.c_str()), "the package ebb is of another version",
          EBB_UNIMPLEMENTED);
  EXPECT_EQ(ebb_import_tensors(nullptr, folder.c_str()), EBB_INVALID_ARGUMENT);
}

TEST_F(CInterface, ACheckpointKeepsTheCallersBytes) {
  MakeEngine(1);
  const std::string folder = ::testing::TempDir() + "c_interface_checkpoint";
  std::filesystem::remove_all(folder);
  auto options = Sized<ebb_save_options>();
  options.trainer_bytes = 8;
  Refuses(ebb_save(engine_, folder.c_str(), &options, nullptr),
          "trainer_bytes of ebb_save_options is 8, but trainer is");
  options.trainer = "place 17";
  int64_t ticket = 0;
  ASSERT_EQ(ebb_save(engine_, folder.c_str(), &options, &ticket), EBB_OK) << ebb_error();
  ASSERT_EQ(ebb_save_wait(engine_, ticket, nullptr), EBB_OK) << ebb_error();
  EXPECT_EQ(ebb_save_wait(engine_, ticket + 1, nullptr), EBB_INVALID_ARGUMENT);
  auto loaded = Sized<ebb_loaded>();
  ASSERT_EQ(ebb_load(engine_, folder.c_str(), &loaded), EBB_OK) << ebb_error();
  EXPECT_EQ(loaded.ranks, 1);
  EXPECT_EQ(std::string(static_cast<const char*>(loaded.trainer),
                        static_cast<size_t>(loaded.trainer_bytes)),
            "place 17");
  EXPECT_EQ(ebb_load(engine_, (folder + "/none").c_str(), nullptr), EBB_NOT_FOUND);
  auto values_alone = Sized<ebb_load_options>();
  values_alone.without_states = 1;
  EXPECT_EQ(ebb_load_with(engine_, folder.c_str(), &values_alone, nullptr), EBB_OK);
  // One run at a time saves to a folder.
  ebb_engine* other = nullptr;
  ASSERT_EQ(ebb_engine_create(world_, model_, kConfig, nullptr, &other), EBB_OK) << ebb_error();
  Refuses(ebb_save(other, folder.c_str(), &options, &ticket),
          "another run saves to '" + folder + "'", EBB_FAILED_PRECONDITION);
  ebb_engine_destroy(other);
  // Nothing is loaded for a caller that has no room for the answer.
  const std::vector<float> written(4, 9.0f);
  const ebb_fill nines = [](void* user, int32_t, int64_t begin, int64_t end,
                            float* values) -> int32_t {
    std::copy_n(static_cast<const float*>(user) + begin, end - begin, values);
    return 0;
  };
  ASSERT_EQ(ebb_write(engine_, EBB_MASTER, nullptr, nines, const_cast<float*>(written.data())),
            EBB_OK)
      << ebb_error();
  loaded.struct_size = 0;
  EXPECT_EQ(ebb_load(engine_, folder.c_str(), &loaded), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(Gathered(0), written);
  std::filesystem::remove_all(folder);
}

TEST_F(CInterface, TheModelAloneIsPlanned) {
  MakeModel(3);
  size_t needed = 0;
  ASSERT_EQ(ebb_plan(model_, 4, kConfig, nullptr, 0, &needed), EBB_OK) << ebb_error();
  std::string text(needed, '?');
  ASSERT_EQ(ebb_plan(model_, 4, kConfig, text.data(), needed - 1, nullptr), EBB_OUT_OF_RANGE);
  ASSERT_EQ(ebb_plan(model_, 4, kConfig, text.data(), needed, nullptr), EBB_OK);
  EXPECT_THAT(text, HasSubstr("4 ranks"));
  int32_t count = 0;
  ASSERT_EQ(ebb_predict_memory(model_, 4, kConfig, nullptr, 0, &count), EBB_OK);
  std::vector<ebb_memory_row> rows(static_cast<size_t>(count));
  ASSERT_EQ(ebb_predict_memory(model_, 4, kConfig, rows.data(), count, &count), EBB_OK);
  EXPECT_GT(
      std::accumulate(rows.begin(), rows.end(), uint64_t{0},
                      [](uint64_t sum, const ebb_memory_row& row) { return sum + row.predicted; }),
      0u);
  ASSERT_EQ(ebb_config_resolve(kConfig, 4, nullptr, 0, &needed), EBB_OK);
  EXPECT_EQ(ebb_plan(model_, 4, "{", nullptr, 0, &needed), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(ebb_plan(model_, 4, nullptr, nullptr, 0, &needed), EBB_INVALID_ARGUMENT);
}

TEST_F(CInterface, ParametersThatCannotBeAreRefusedByName) {
  model_ = ebb_model_create();
  ebb_model_add_unit(model_, "unit", 0);
  auto parameter = Sized<ebb_parameter>();
  Refuses(ebb_model_add_parameter(model_, 0, &parameter), "no name", -1);
  parameter.name = "w";
  Refuses(ebb_model_add_parameter(model_, 5, &parameter), "w was given to unit 5", -1);
  parameter.dimensions = 2;
  EXPECT_EQ(ebb_model_add_parameter(model_, 0, &parameter), -1);
  parameter.dimensions = 0;
  parameter.source = values_;
  parameter.source_dtype = EBB_INT8 + 1;
  Refuses(ebb_model_add_parameter(model_, 0, &parameter),
          "w: source_dtype is 4: there are EBB_FP32, EBB_BF16, EBB_FP16", -1);
  parameter.source_dtype = EBB_FP32;
  parameter.has_dtype = 1;
  parameter.dtype = -1;
  Refuses(ebb_model_add_parameter(model_, 0, &parameter), "w: dtype is -1", -1);
  parameter.has_dtype = 0;
  parameter.source = nullptr;
  parameter.file = "/nowhere/model.safetensors";
  Refuses(ebb_model_add_parameter(model_, 0, &parameter), "/nowhere", -1);
  ebb_engine* none = nullptr;
  EXPECT_NE(ebb_engine_create(world_, model_, kConfig, nullptr, &none), EBB_OK);
  auto options = Sized<ebb_engine_options>();
  options.threads = -3;
  Refuses(ebb_engine_create(world_, model_, kConfig, &options, &none),
          "threads of ebb_engine_options is -3");
  EXPECT_EQ(none, nullptr);
}

TEST_F(CInterface, AParameterIsCutOverTensorRanks) {
  MakeModel(1);
  const int64_t shape[] = {256, 96}, parts[] = {64, 32};
  std::vector<float> block(256 * 48, 1.0f);
  auto parameter = Sized<ebb_parameter>();
  parameter.trainable = 1;
  parameter.name = "cut";
  parameter.shape = shape;
  parameter.dimensions = 2;
  parameter.source = block.data();
  parameter.block_rank = 1;
  parameter.block_ranks = 2;
  EXPECT_EQ(ebb_model_add_parameter(model_, 0, &parameter), -1);
  EXPECT_THAT(ebb_error(), HasSubstr("cut: block_ranks is given"));
  parameter.has_split = 1;
  parameter.split_dimension = 2;
  ebb_model_add_parameter(model_, 0, &parameter);
  EXPECT_THAT(ebb_error(), HasSubstr("split.dimension is 2"));
  parameter.split_dimension = 1;
  parameter.split_parts = parts;
  parameter.split_part_count = 1;
  ebb_model_add_parameter(model_, 0, &parameter);
  EXPECT_THAT(ebb_error(), HasSubstr("split.parts are 64"));
  parameter.split_part_count = 2;
  parameter.block_rank = 2;
  ebb_model_add_parameter(model_, 0, &parameter);
  EXPECT_THAT(ebb_error(), HasSubstr("block_rank 2 is none of 2 tensor ranks"));
  parameter.block_rank = 1;
  ASSERT_EQ(ebb_model_add_parameter(model_, 0, &parameter), 1) << ebb_error();

  // A tensor rank gathers its block alone.
  const std::string json = std::string(R"({"ebb": {"mesh": {"tensor": 2}}, )") + (kConfig + 1);
  const auto gathered = [&](const char* config) {
    std::vector<ebb_memory_row> rows(64);
    int32_t count = 0;
    EXPECT_EQ(ebb_predict_memory(model_, 4, config, rows.data(), 64, &count), EBB_OK)
        << ebb_error();
    uint64_t bytes = 0;
    for (int32_t i = 0; i < count; ++i)
      if (rows[i].state == EBB_GATHER) bytes += rows[i].predicted;
    return bytes;
  };
  EXPECT_EQ(gathered(kConfig) - gathered(json.c_str()), block.size() * sizeof(float));
}

TEST_F(CInterface, ABlockOfOneTensorRankIsTheWhole) {
  MakeModel(1);
  const int64_t shape[] = {2, 3};
  const float values[] = {0, 1, 2, 3, 4, 5};
  auto parameter = Sized<ebb_parameter>();
  parameter.trainable = 1;
  parameter.name = "cut";
  parameter.shape = shape;
  parameter.dimensions = 2;
  parameter.source = values;
  parameter.has_split = 1;
  parameter.split_dimension = 1;
  parameter.block_ranks = 1;
  ASSERT_EQ(ebb_model_add_parameter(model_, 0, &parameter), 1) << ebb_error();
  ASSERT_EQ(ebb_engine_create(world_, model_, kConfig, nullptr, &engine_), EBB_OK) << ebb_error();
  std::vector<float> gathered(6);
  ASSERT_EQ(ebb_gather(
                engine_, 1, EBB_MASTER, 0,
                [](void* to, int32_t, int64_t begin, int64_t end, const float* from) -> int32_t {
                  std::copy(from, from + (end - begin), static_cast<float*>(to) + begin);
                  return 0;
                },
                gathered.data()),
            EBB_OK)
      << ebb_error();
  EXPECT_THAT(gathered, ::testing::ElementsAreArray(values));

  auto facts = Sized<ebb_mesh_facts>();
  ASSERT_EQ(ebb_engine_mesh(engine_, &facts), EBB_OK) << ebb_error();
  EXPECT_EQ(facts.data_ranks, 1);
  EXPECT_EQ(facts.tensor_ranks, 1);
  EXPECT_EQ(facts.tensor_rank, 0);
  float out[6] = {};
  EXPECT_EQ(ebb_tensor_all_gather(engine_, values, out, 6, EBB_FP32), EBB_OK) << ebb_error();
  EXPECT_THAT(out, ::testing::ElementsAreArray(values));
  EXPECT_EQ(ebb_tensor_all_reduce(engine_, out, 6, EBB_FP32, EBB_MAX), EBB_OK) << ebb_error();
  EXPECT_EQ(ebb_tensor_reduce_scatter(engine_, values, out, 6, EBB_FP32), EBB_OK) << ebb_error();
  EXPECT_THAT(out, ::testing::ElementsAreArray(values));
  Refuses(ebb_tensor_all_reduce(engine_, out, 6, EBB_FP32, 3), "there are EBB_SUM");
  Refuses(ebb_tensor_all_reduce(engine_, out, 6, 9, EBB_SUM), "dtype is 9");
  Refuses(ebb_tensor_all_gather(engine_, nullptr, out, 6, EBB_FP32), "null pointer");
  Refuses(ebb_tensor_reduce_scatter(engine_, values, out, 0, EBB_FP32), "over 0 elements");
}

TEST_F(CInterface, BytesOfAFileAreNoNumbers) {
  const std::string path = ::testing::TempDir() + "/bytes_of_a_file.safetensors";
  const std::string header = R"({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})";
  std::ofstream(path, std::ios::binary)
      << static_cast<char>(header.size()) << std::string(7, '\0') << header << "abcd";
  model_ = ebb_model_create();
  ebb_model_add_unit(model_, "unit", 0);
  const int64_t shape[] = {4};
  auto parameter = Sized<ebb_parameter>();
  parameter.name = "w";
  parameter.shape = shape;
  parameter.dimensions = 1;
  parameter.file = path.c_str();
  Refuses(ebb_model_add_parameter(model_, 0, &parameter), "is bytes, and the parameter numbers",
          -1);
  parameter.has_dtype = 1;
  parameter.dtype = EBB_INT8;
  EXPECT_EQ(ebb_model_add_parameter(model_, 0, &parameter), 0) << ebb_error();
  std::filesystem::remove(path);
}

TEST_F(CInterface, OlderStructsAreAcceptedAndNewerOnesAreNot) {
  struct Newer {
    ebb_world_options known;
    uint64_t unknown;
  } newer = {{sizeof(Newer), 0}, 0};
  ebb_world* world = nullptr;
  ASSERT_EQ(ebb_world_open(&newer.known, &world), EBB_OK) << ebb_error();
  ebb_world_close(world);
  newer.unknown = 1;
  EXPECT_EQ(ebb_world_open(&newer.known, &world), EBB_UNIMPLEMENTED);
  ebb_world_options unset = {};
  Refuses(ebb_world_open(&unset, &world), "struct_size");
  // An older caller's report ends before the newer fields.
  ebb_world_facts facts = {offsetof(ebb_world_facts, local_rank), -1, -1, -1, -1};
  ASSERT_EQ(ebb_world_describe(world_, &facts), EBB_OK);
  EXPECT_EQ(facts.size, 1);
  EXPECT_EQ(facts.local_size, -1);
  // A newer caller's report has 0 in fields that this library does not know.
  struct NewerFacts {
    ebb_world_facts known;
    int32_t unknown;
  } newer_facts = {{sizeof(NewerFacts), 0, 0, 0, 0}, -1};
  ASSERT_EQ(ebb_world_describe(world_, &newer_facts.known), EBB_OK);
  EXPECT_EQ(newer_facts.unknown, 0);
}

TEST_F(CInterface, NullUnknownAndDestroyedHandlesAreErrors) {
  MakeEngine(1);
  auto* const stray = reinterpret_cast<ebb_engine*>(world_);
  ebb_engine* const gone = engine_;
  ebb_engine_destroy(engine_);
  engine_ = nullptr;
  int64_t number = 0;
  int32_t count = 0;
  for (ebb_engine* engine : {static_cast<ebb_engine*>(nullptr), stray, gone}) {
    EXPECT_EQ(ebb_engine_close(engine), EBB_INVALID_ARGUMENT);
    EXPECT_EQ(ebb_step_begin(engine, nullptr), EBB_INVALID_ARGUMENT);
    EXPECT_EQ(ebb_scope_open(engine, EBB_FORWARD, 0, &number), EBB_INVALID_ARGUMENT);
    EXPECT_EQ(ebb_step_finish(engine, nullptr), EBB_INVALID_ARGUMENT);
    EXPECT_EQ(ebb_memory(engine, nullptr, 0, &count), EBB_INVALID_ARGUMENT);
    EXPECT_EQ(ebb_load(engine, "x", nullptr), EBB_INVALID_ARGUMENT);
    EXPECT_NE(std::string(ebb_error()), "");
    ebb_engine_destroy(engine);
  }
  EXPECT_EQ(ebb_model_add_unit(nullptr, "unit", 0), -1);
  EXPECT_EQ(ebb_world_describe(nullptr, nullptr), EBB_INVALID_ARGUMENT);
  ebb_world_close(nullptr);
  ebb_model_destroy(nullptr);
}

TEST_F(CInterface, ScopesThatAreWrongAreErrors) {
  MakeEngine(1);
  int64_t scope = 0;
  EXPECT_EQ(ebb_scope_open(engine_, EBB_FORWARD, 0, &scope), EBB_FAILED_PRECONDITION);
  ASSERT_EQ(ebb_step_begin(engine_, nullptr), EBB_OK);
  EXPECT_EQ(ebb_scope_open(engine_, EBB_FORWARD, 9, &scope), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(ebb_scope_open(engine_, 9, 0, &scope), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(ebb_scope_open(engine_, EBB_FORWARD, 0, nullptr), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(ebb_scope_close(engine_, 77), EBB_INVALID_ARGUMENT);
  ASSERT_EQ(ebb_scope_open(engine_, EBB_FORWARD, 0, &scope), EBB_OK);
  ebb_gradient gradient;
  const int32_t parameter = 0, foreign = 3;
  EXPECT_EQ(ebb_scope_gradients(engine_, scope, &parameter, 1, &gradient), EBB_FAILED_PRECONDITION);
  ASSERT_EQ(ebb_scope_close(engine_, scope), EBB_OK);
  EXPECT_EQ(ebb_scope_close(engine_, scope), EBB_INVALID_ARGUMENT);
  ASSERT_EQ(ebb_scope_open(engine_, EBB_BACKWARD, 0, &scope), EBB_OK);
  EXPECT_EQ(ebb_scope_gradients(engine_, scope, &foreign, 1, &gradient), EBB_INVALID_ARGUMENT);
  EXPECT_EQ(ebb_scope_gradients(engine_, scope, &parameter, -1, &gradient), EBB_INVALID_ARGUMENT);
  ASSERT_EQ(ebb_step_drop(engine_), EBB_OK);
  EXPECT_EQ(ebb_step_finish(engine_, nullptr), EBB_FAILED_PRECONDITION);
}

TEST_F(CInterface, TheLogGoesToTheCaller) {
  std::string lines;
  ebb_log_to(
      [](void* user, int32_t, const char* line) { *static_cast<std::string*>(user) += line; },
      &lines);
  MakeEngine(1);
  ebb_log_to(nullptr, nullptr);
  EXPECT_THAT(lines, HasSubstr("1 rank on CPU"));
}

}  // namespace
