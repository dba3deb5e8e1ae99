#include "ebb/runtime/config/trainer_values.h"

#include "ebb/runtime/config/document.h"
#include "gtest/gtest.h"

namespace ebb::config::trainer_values_test {
namespace {

// A file with parameters but without a type is refused later. The file's values stay unchanged.
TEST(TrainersShare, ParametersOfAnOptimizerWithoutATypeAreNotReplaced) {
  absl::StatusOr<Document> document = ParseDocument(R"({"optimizer": {"params": {"lr": 0.5}}})");
  ASSERT_TRUE(document.ok()) << document.status();
  Reading reading = ReadValues(*document, std::nullopt);
  TrainersShare trainer({.learning_rate = 3e-4, .epsilon = 1e-6});
  trainer.Fill(reading, document->problems);
  EXPECT_EQ(*reading.values.Value("optimizer.params.lr"), 0.5);
  EXPECT_EQ(*reading.values.Value("optimizer.params.eps"), 1e-6);
}

}  // namespace
}  // namespace ebb::config::trainer_values_test
