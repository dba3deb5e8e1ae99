// Trainers that use what the engine allows off the declared order, each against the same trainer without it:
// the same bits, in masters and moments.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"

namespace ebb::testing {
namespace {

constexpr int64_t kWidth = 40;
using Numbers = std::vector<float>;

// Layers y = tanh(w x), element by element, of one unit each; `visits` names them in the order of forward.
class Chain {
 public:
  Chain(const std::string& name, int layers, const std::vector<int>& visits) {
    for (int layer = 0; layer < layers; ++layer) {
      const UnitId unit = spec_.AddUnit(absl::StrCat(name, layer));
      weights_.push_back(spec_.Add(
          unit,
          {.name = absl::StrCat(name, ".w", layer), .shape = {kWidth}, .init = Normal(0.7f, 3)}));
    }
    for (int layer : visits) spec_.forward.push_back({.unit = UnitId{layer}});
  }

  const ModelSpec& spec() const { return spec_; }
  ParameterId weight(int layer) const { return weights_[static_cast<size_t>(layer)]; }

  static Numbers Forward(const Numbers& w, const Numbers& x) {
    Numbers y(x.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = std::tanh(w[i] * x[i]);
    return y;
  }
  // The gradient of x; `dw` is that of w.
  static Numbers Backward(const Numbers& w, const Numbers& x, const Numbers& dy, Numbers& dw) {
    Numbers dx(x.size());
    dw.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const float y = std::tanh(w[i] * x[i]), d = dy[i] * (1 - y * y);
      dw[i] = d * x[i];
      dx[i] = d * w[i];
    }
    return dx;
  }

 private:
  ModelSpec spec_;
  std::vector<ParameterId> weights_;
};

Numbers Sample(int rank, int64_t step, int number) {
  Numbers x(kWidth);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = std::sin(static_cast<float>(1 + 3 * static_cast<int>(i) + 17 * rank + 29 * number) +
                    static_cast<float>(step));
  return x;
}

Numbers Distance(const Numbers& y, float target) {
  Numbers dy(y.size());
  for (size_t i = 0; i < y.size(); ++i) dy[i] = y[i] - target;
  return dy;
}

class TrainersTest : public ::testing::TestWithParam<Setting> {
 protected:
  // What `train` leaves on each rank, in memory and, where the stage allows it, on NVMe.
  using Trainer = std::function<absl::StatusOr<std::vector<Snapshot>>(World world, const Config&)>;
  void Compare(int rounds, const Trainer& with, const Trainer& without) {
    Scratch scratch;
    for (const Setting& setting : At(GetParam(), kTimings)) {
      for (const bool on_nvme : {false, true}) {
        if (on_nvme && setting.stage == 0) continue;
        SCOPED_TRACE(::testing::Message() << setting << (on_nvme ? ", on NVMe" : ""));
        Config config = ConfigFor(setting);
        config.gradient_accumulation_steps = rounds;
        if (on_nvme) config = OnNvme(config, scratch.path());
        const std::vector<std::vector<Snapshot>> right = Run(setting, config, without);
        for (const std::vector<Snapshot>& rank : right) EXPECT_FALSE(rank.empty());
        EXPECT_EQ(Run(setting, config, with), right);
      }
    }
  }

 private:
  static std::vector<std::vector<Snapshot>> Run(const Setting& setting, const Config& config,
                                                const Trainer& train) {
    std::vector<std::vector<Snapshot>> left(static_cast<size_t>(setting.world));
    const absl::Status status = RunThreads(setting.world, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(left[static_cast<size_t>(world.rank())], train(world, config));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return left;
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, TrainersTest, ::testing::ValuesIn(WorldsAndStages({1, 2})), NameOf);

// The generator's gradient comes through the discriminator: a step of that which is held, asks for no
// gradient and is dropped. Without it the discriminator's parameters are gathered between steps.
TEST_P(TrainersTest, AGanPassesThroughTheDiscriminatorInAStepThatIsDropped) {
  const auto gan = [](bool passes) {
    return [passes](World world, const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      const Chain generator("g", 2, {0, 1}), judge("d", 3, {0, 1, 2});
      EBB_ASSIGN_OR_RETURN(Engine g,
                           Engine::Create(world, Device::Cpu(1), generator.spec(), config));
      EBB_ASSIGN_OR_RETURN(Engine d, Engine::Create(world, Device::Cpu(1), judge.spec(), config));
      // Opens a scope of `layer` and takes its parameters; `gradient` is of those of a backward.
      const auto forward = [](const Chain& chain, Step& step, int layer, std::vector<Numbers>& x) {
        const ForwardScope scope = step.Forward(UnitId{layer});
        x.push_back(Chain::Forward(Values(scope.parameter(chain.weight(layer))), x.back()));
      };
      const auto backward = [](const Chain& chain, Step& step, int layer, const Numbers& x,
                               const Numbers& dy, bool asks) {
        BackwardScope scope = step.Backward(UnitId{layer});
        Numbers dw;
        Numbers dx = Chain::Backward(Values(scope.parameter(chain.weight(layer))), x, dy, dw);
        if (asks) AddTo(scope.gradient(chain.weight(layer)), dw);
        return dx;
      };
      for (int64_t number = 0; number < 4; ++number) {
        // The discriminator learns a true sample and a made one.
        Numbers made = Sample(world.rank(), number, 0);
        if (passes) {
          Step step = g.BeginStep({.hold_updates = true});
          std::vector<Numbers> x = {made};
          for (int layer : {0, 1}) forward(generator, step, layer, x);
          made = x.back();
        } else {
          for (int layer : {0, 1}) {
            Numbers w(kWidth);
            EBB_RETURN_IF_ERROR(g.Gather(generator.weight(layer), StateClass::kParameter, w));
            made = Chain::Forward(w, made);
          }
        }
        {
          Step step = d.BeginStep();
          std::vector<Numbers> truth = {Sample(world.rank(), number, 1)}, fake = {made};
          for (int layer : {0, 1, 2}) {
            const ForwardScope scope = step.Forward(UnitId{layer});
            const Numbers w = Values(scope.parameter(judge.weight(layer)));
            truth.push_back(Chain::Forward(w, truth.back()));
            fake.push_back(Chain::Forward(w, fake.back()));
          }
          Numbers of_truth = Distance(truth.back(), 1), of_fake = Distance(fake.back(), 0);
          for (int layer : {2, 1, 0}) {
            BackwardScope scope = step.Backward(UnitId{layer});
            const Numbers w = Values(scope.parameter(judge.weight(layer)));
            Numbers dw;
            of_truth = Chain::Backward(w, truth[static_cast<size_t>(layer)], of_truth, dw);
            AddTo(scope.gradient(judge.weight(layer)), dw);
            of_fake = Chain::Backward(w, fake[static_cast<size_t>(layer)], of_fake, dw);
            AddTo(scope.gradient(judge.weight(layer)), dw);
          }
          EBB_RETURN_IF_ERROR(step.Finish());
        }
        // The generator learns to pass for true.
        std::vector<Numbers> w;
        for (int layer : {0, 1, 2}) {
          if (passes) break;
          w.emplace_back(kWidth);
          EBB_RETURN_IF_ERROR(d.Gather(judge.weight(layer), StateClass::kParameter, w.back()));
        }
        Step step = g.BeginStep();
        std::vector<Numbers> x = {Sample(world.rank(), number, 2)};
        for (int layer : {0, 1}) forward(generator, step, layer, x);
        Numbers dy;
        if (passes) {
          Step through = d.BeginStep({.hold_updates = true});
          for (int layer : {0, 1, 2}) forward(judge, through, layer, x);
          dy = Distance(x.back(), 1);
          for (int layer : {2, 1, 0})
            dy = backward(judge, through, layer, x[static_cast<size_t>(layer) + 2], dy,
                          /*asks=*/false);
        } else {
          for (int layer : {0, 1, 2})
            x.push_back(Chain::Forward(w[static_cast<size_t>(layer)], x.back()));
          dy = Distance(x.back(), 1);
          Numbers dw;
          for (int layer : {2, 1, 0})
            dy = Chain::Backward(w[static_cast<size_t>(layer)], x[static_cast<size_t>(layer) + 2],
                                 dy, dw);
        }
        for (int layer : {1, 0})
          dy = backward(generator, step, layer, x[static_cast<size_t>(layer)], dy, /*asks=*/true);
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot of_g, TakeSnapshot(g, generator.spec()));
      EBB_ASSIGN_OR_RETURN(Snapshot of_d, TakeSnapshot(d, judge.spec()));
      return std::vector<Snapshot>{std::move(of_g), std::move(of_d)};
    };
  };
  Compare(/*rounds=*/1, gan(true), gan(false));
}

// One layer is applied again and again, another depth in each step, and then some of three others: the most
// visits are declared, and what a step does without is left out. Without that it opens every visit, and
// asks for nothing.
TEST_P(TrainersTest, AVaryingDepthLeavesOutWhatItDoesWithout) {
  const auto varying = [](bool leaves_out) {
    return [leaves_out](World world,
                        const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      const std::vector<int> visits = {0, 1, 1, 1, 1, 2, 3, 4, 5};
      const Chain chain("u", 6, visits);
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), config));
      for (int64_t number = 0; number < 4; ++number) {
        Step step = engine.BeginStep({.may_leave_out = leaves_out});
        for (int round = 0; round < step.rounds(); ++round) {
          // Of the four visits of layer 1 the last so many, and of layers 2 to 4 the first.
          const int again = static_cast<int>(number + round) % 4 + 1;
          const int beyond = static_cast<int>(2 * number + round) % 4;
          std::vector<bool> used(visits.size(), true);
          for (size_t v = 1; v < 8; ++v)
            used[v] = v < 5 ? static_cast<int>(v) >= 5 - again : static_cast<int>(v) - 5 < beyond;
          std::vector<Numbers> x = {Sample(world.rank(), number, round)};
          for (size_t v = 0; v < visits.size(); ++v) {
            x.push_back(x.back());
            if (!used[v] && leaves_out) continue;
            const ForwardScope scope = step.Forward(UnitId{visits[v]});
            if (used[v])
              x.back() = Chain::Forward(Values(scope.parameter(chain.weight(visits[v]))), x.back());
          }
          Numbers dy = Distance(x.back(), 0.5f);
          for (size_t v = visits.size(); v-- > 0;) {
            if (!used[v] && leaves_out) continue;
            BackwardScope scope = step.Backward(UnitId{visits[v]});
            if (!used[v]) continue;
            Numbers dw;
            dy = Chain::Backward(Values(scope.parameter(chain.weight(visits[v]))), x[v], dy, dw);
            AddTo(scope.gradient(chain.weight(visits[v])), dw);
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot end, TakeSnapshot(engine, chain.spec()));
      return std::vector<Snapshot>{std::move(end)};
    };
  };
  for (const int rounds : {1, 2}) Compare(rounds, varying(true), varying(false));
}

}  // namespace
}  // namespace ebb::testing
