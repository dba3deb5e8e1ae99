// The special properties of each rule, and the names of every rule's states.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ebb/optim/update.h"
#include "ebb/optim/update_constants.h"
#include "every_target.h"
#include "reference.h"
#include "rules.h"

namespace ebb::optim::update_rules_test {
namespace {

// torch copies the gradient, so the old contents of the memory must have no effect.
TEST(UpdateRulesTest, SgdsFirstStepDoesNotReadTheMomentum) {
  ThreadTeam team(1);
  ForEveryTarget([&] {
    std::vector<float> master(20, 1.0f), gradient(20, 0.5f),
        momentum(20, std::numeric_limits<float>::quiet_NaN());
    Update(team, {.type = OptimizerType::kSgd, .momentum = 0.9},
           {.master = master.data(),
            .gradient = gradient.data(),
            .states = {{momentum.data()}},
            .count = 20},
           {.step = 1, .learning_rate = 0.5});
    for (const float value : momentum) EXPECT_EQ(value, 0.5f);
    for (const float value : master) EXPECT_EQ(value, 0.75f);
  });
}

// The sign of zero is zero: an element with neither gradient nor momentum only decays, as padding
// does.
TEST(UpdateRulesTest, LionMovesNothingWithoutADirection) {
  ThreadTeam team(1);
  ForEveryTarget([&] {
    std::vector<float> master(20, 0.5f), gradient(20, -0.0f), momentum(20);
    gradient[3] = std::numeric_limits<float>::quiet_NaN();
    gradient[17] = 1e-40f;
    Update(team, {.type = OptimizerType::kLion},
           {.master = master.data(),
            .gradient = gradient.data(),
            .states = {{momentum.data()}},
            .count = 20},
           {.step = 1, .learning_rate = 0.25});
    for (size_t i = 0; i < master.size(); ++i) {
      if (i == 3) {
        EXPECT_TRUE(std::isnan(master[i]));
      } else {
        EXPECT_EQ(master[i], i == 17 ? 0.25f : 0.5f) << i;
      }
    }
  });
}

// A steady gradient; rounding makes its centered variance negative now and then.
TEST(UpdateRulesTest, CenteredRmspropOfASteadyGradientStaysFinite) {
  ThreadTeam team(1);
  const OptimizerConfig optimizer = {
      .type = OptimizerType::kRmsprop, .alpha = 0.5, .centered = true};
  ForEveryTarget([&] {
    std::vector<float> master(64), gradient(64), square(64), average(64);
    for (size_t i = 0; i < 64; ++i) gradient[i] = 0.7f + 0.01f * static_cast<float>(i);
    for (int step = 1; step <= 80; ++step) {
      Update(team, optimizer,
             {.master = master.data(),
              .gradient = gradient.data(),
              .states = {{square.data()}, {average.data()}},
              .count = 64},
             {.step = step, .learning_rate = 1e-9});
    }
    bool negative = false;
    for (size_t i = 0; i < 64; ++i) {
      EXPECT_TRUE(std::isfinite(master[i])) << i;
      negative |= std::fma(-average[i], average[i], square[i]) < 0;
    }
    EXPECT_TRUE(negative);  // the case under test has occurred
  });
}

// The direction is written where a master is, and rounded where a parameter is.
TEST(UpdateRulesTest, MuonsTwoPasses) {
  ThreadTeam team(2);
  constexpr size_t kCount = 1031;
  const UpdateScalars scalars{.step = 3, .learning_rate = 0.02, .gradient_factor = 0.37f};
  for (const bool nesterov : {false, true}) {
    const OptimizerConfig muon{
        .type = OptimizerType::kMuon, .weight_decay = 0.1, .momentum = 0.95, .nesterov = nesterov};
    const UpdateConstants constants = UpdateConstantsOf(muon, scalars);
    const auto number = [](size_t i, float step) { return std::sin(static_cast<float>(i) * step); };
    ForEveryTarget([&] {
      std::vector<float> gradient(kCount), momentum(kCount), direction(kCount, -1), master(kCount);
      std::vector<BFloat16> rounded(kCount);
      for (size_t i = 0; i < kCount; ++i) {
        gradient[i] = number(i, 0.3f), momentum[i] = number(i, 0.7f), master[i] = number(i, 1.1f);
      }
      const std::vector<float> momentum_before = momentum, master_before = master;
      Update(team, UpdateRule::kMuonMomentum,
             {.master = direction.data(),
              .gradient = gradient.data(),
              .states = {{momentum.data()}},
              .parameter = rounded.data(),
              .parameter_dtype = DType::kBFloat16,
              .count = kCount},
             constants);
      Update(team, UpdateRule::kMuon,
             {.master = master.data(),
              .gradient = rounded.data(),
              .gradient_dtype = DType::kBFloat16,
              .count = kCount},
             constants);
      for (size_t i = 0; i < kCount; ++i) {
        float m = momentum_before[i], p = master_before[i];
        EXPECT_EQ(direction[i], ReferenceMuonDirection(muon, scalars, gradient[i], m)) << i;
        EXPECT_EQ(momentum[i], m) << i;
        EXPECT_EQ(rounded[i].bits, RoundHalfAway(direction[i]).bits) << i;
        ReferenceMuon(muon, scalars, static_cast<float>(rounded[i]), p);
        EXPECT_EQ(master[i], p) << i;
      }
    });
  }
}

TEST(UpdateRulesTest, StatesAreNamedAsInTorch) {
  using Names = std::vector<std::string>;
  const auto names = [](const OptimizerConfig& optimizer) {
    const auto states = StateNames(optimizer);
    return Names(states.begin(), states.end());
  };
  const struct {
    OptimizerConfig optimizer;
    Names names;
  } kNamed[] = {
      {{.type = OptimizerType::kAdamW}, {"exp_avg", "exp_avg_sq"}},
      {{.type = OptimizerType::kAdam}, {"exp_avg", "exp_avg_sq"}},
      {{.type = OptimizerType::kSgd, .momentum = 0.9}, {"momentum_buffer"}},
      {{.type = OptimizerType::kSgd}, {}},
      {{.type = OptimizerType::kLion}, {"exp_avg"}},
      {{.type = OptimizerType::kAdagrad}, {"sum"}},
      {{.type = OptimizerType::kRmsprop}, {"square_avg"}},
      {{.type = OptimizerType::kRmsprop, .momentum = 0.9}, {"square_avg", "momentum_buffer"}},
      {{.type = OptimizerType::kRmsprop, .momentum = 0.9, .centered = true},
       {"square_avg", "momentum_buffer", "grad_avg"}},
      {{.type = OptimizerType::kRmsprop, .centered = true}, {"square_avg", "grad_avg"}},
      {{.type = OptimizerType::kLamb}, {"exp_avg", "exp_avg_sq"}},
      {{.type = OptimizerType::kLars, .momentum = 0.9}, {"momentum_buffer"}},
      {{.type = OptimizerType::kLars}, {}},
      {{.type = OptimizerType::kMuon}, {"momentum_buffer"}},
  };
  for (const auto& [optimizer, expected] : kNamed) EXPECT_EQ(names(optimizer), expected);
  for (const Rule& rule : kRules)
    EXPECT_EQ(static_cast<int>(names(rule.optimizer).size()),
              StatesOf(UpdateRuleOf(rule.optimizer)))
        << rule.name;
}

}  // namespace
}  // namespace ebb::optim::update_rules_test
