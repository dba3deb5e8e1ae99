// Trainers that leave the declared order as the engine allows, each against the same trainer in the
// declared order: the same bits, in masters and moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::trainers_test {
namespace {

constexpr int64_t kWidth = 40;
using Numbers = std::vector<float>;

// Layers y = tanh(w x), element by element, of one unit each; `visits` names them in the order of
// forward.
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
  ModelSpec& spec() { return spec_; }
  ParameterId weight(int layer) const { return weights_[static_cast<size_t>(layer)]; }

  static Numbers Forward(const Numbers& w, const Numbers& x) {
    Numbers y(x.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = std::tanh(w[i] * x[i]);
    return y;
  }
  // The gradient of x; `dw`: the gradient of w.
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
  // Snapshots that `train` leaves on each rank, in memory and, where the stage allows it, on NVMe.
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

// The generator's gradient comes through the discriminator: a step of that which is held, asks for
// no gradient and is dropped. Without it the discriminator's parameters are gathered between steps.
TEST_P(TrainersTest, AGanPassesThroughTheDiscriminatorInAStepThatIsDropped) {
  const auto gan = [](bool passes) {
    return [passes](World world, const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      const Chain generator("g", 2, {0, 1}), judge("d", 3, {0, 1, 2});
      EBB_ASSIGN_OR_RETURN(Engine g,
                           Engine::Create(world, Device::Cpu(1), generator.spec(), config));
      EBB_ASSIGN_OR_RETURN(Engine d, Engine::Create(world, Device::Cpu(1), judge.spec(), config));
      // Opens a scope of `layer` and takes its parameters; `gradient`: the one of w, in a backward
      // scope.
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

// One layer is applied several times, a different number in each step, and then some of three
// others. The model declares the most visits, and a step leaves out the rest. Without that it opens
// every visit, and asks for nothing.
TEST_P(TrainersTest, AVaryingDepthLeavesOutUnusedVisits) {
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
          // The last `again` of the four visits of layer 1, and the first `beyond` of the visits of
          // layers 2 to 4.
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

// A root's weights are used before its blocks and behind them. The root's scope stays open over
// those of its blocks, like a module's. Without that it is opened before them in forward, behind
// them in backward, and its values are kept.
TEST_P(TrainersTest, ARootStaysOpenOverItsBlocks) {
  enum class Root { kApart, kOver, kDeclaredOver };
  const auto nested = [](Root root) {
    return [root](World world, const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      const std::vector<int> blocks = {1, 2, 3};
      Chain chain("u", 4, {0, 1, 2, 3});
      if (root != Root::kApart) {
        std::vector<ScopeEvent>& order = chain.spec().order;
        order.push_back({.visit = 0});
        for (int block : blocks) chain.spec().AddScope({.visit = block});
        order.push_back({.opens = false, .visit = 0});
        order.push_back({.backward = true, .visit = 0});
        for (size_t b = blocks.size(); b-- > 0;)
          chain.spec().AddScope({.backward = true, .visit = blocks[b]});
        order.push_back({.opens = false, .backward = true, .visit = 0});
      }
      const bool over = root == Root::kOver;
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), config));
      const ParameterId of_root = chain.weight(0);
      for (int64_t number = 0; number < 4; ++number) {
        Step step = engine.BeginStep({.hold_updates = number == 3});
        for (int round = 0; round < step.rounds(); ++round) {
          ForwardScope forward = step.Forward(UnitId{0});
          const Numbers kept = Values(forward.parameter(of_root));
          const auto of_forward = [&] { return over ? Values(forward.parameter(of_root)) : kept; };
          const Numbers sample = Sample(world.rank(), number, round);
          std::vector<Numbers> x = {Chain::Forward(of_forward(), sample)};
          if (!over) forward.Close();
          for (int block : blocks) {
            const ForwardScope scope = step.Forward(UnitId{block});
            x.push_back(Chain::Forward(Values(scope.parameter(chain.weight(block))), x.back()));
          }
          const Numbers y = Chain::Forward(of_forward(), x.back());
          forward.Close();
          Numbers at_end, dw;
          BackwardScope backward;
          // Declared over them, but opened behind them, it would come out of order.
          if (root != Root::kApart) backward = step.Backward(UnitId{0});
          Numbers dy =
              Chain::Backward(root == Root::kApart ? kept : Values(backward.parameter(of_root)),
                              x.back(), Distance(y, 0.5f), at_end);
          if (root != Root::kApart) AddTo(backward.gradient(of_root), at_end);
          for (size_t b = blocks.size(); b-- > 0;) {
            BackwardScope scope = step.Backward(UnitId{blocks[b]});
            const ParameterId w = chain.weight(blocks[b]);
            dy = Chain::Backward(Values(scope.parameter(w)), x[b], dy, dw);
            AddTo(scope.gradient(w), dw);
          }
          if (root == Root::kApart) {
            backward = step.Backward(UnitId{0});
            AddTo(backward.gradient(of_root), at_end);
          }
          Chain::Backward(Values(backward.parameter(of_root)), sample, dy, dw);
          AddTo(backward.gradient(of_root), dw);
        }
        EBB_RETURN_IF_ERROR(step.Finish());
        Evaluation evaluation = engine.BeginEvaluation(1);
        ForwardScope shown = evaluation.Forward(UnitId{0});
        if (!over) shown.Close();
        for (int block : blocks) evaluation.Forward(UnitId{block}).Close();
        shown.Close();
        EBB_RETURN_IF_ERROR(evaluation.Finish().status());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot end, TakeSnapshot(engine, chain.spec()));
      return std::vector<Snapshot>{std::move(end)};
    };
  };
  Compare(/*rounds=*/2, nested(Root::kOver), nested(Root::kApart));
  // The root may also close before its blocks open.
  Compare(/*rounds=*/1, nested(Root::kDeclaredOver), nested(Root::kApart));
}

// Segments of two layers keep their input only. Backward computes both layers again, in scopes of
// their own. Boundaries are the trainer's, or the engine's, which then keeps those between segments
// only.
TEST_P(TrainersTest, SegmentsAreRecomputedInBackward) {
  const auto checkpointed = [](bool recomputes, bool owns_boundaries) {
    return [recomputes, owns_boundaries](
               World world, const Config& given) -> absl::StatusOr<std::vector<Snapshot>> {
      Chain chain("u", 6, {0, 1, 2, 3, 4, 5});
      const std::vector<int> segments = {0, 2, 4};
      Config config = given;
      if (owns_boundaries) {
        for (Visit& visit : chain.spec().forward) visit.output_bytes = kWidth * 4;
        if (given.zero.stage == 2) config.ebb.offload_activations = Tier::kCpu;
        if (given.optimizer_tier() == Tier::kNvme) config.ebb.offload_activations = Tier::kNvme;
      }
      if (recomputes) {
        for (int layer = 0; layer < 6; ++layer) chain.spec().AddScope({.visit = layer});
        for (size_t s = segments.size(); s-- > 0;) {
          for (int layer : {segments[s], segments[s] + 1})
            chain.spec().AddScope({.recompute = true, .visit = layer});
          for (int layer : {segments[s] + 1, segments[s]})
            chain.spec().AddScope({.backward = true, .visit = layer});
        }
      }
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), config));
      std::vector<Numbers> x(7);  // the input of each layer, and the output of the last
      const auto forward = [&](ForwardScope scope, int layer) {
        const size_t at = static_cast<size_t>(layer);
        const int m = scope.micro_batches().front();
        const bool passed = owns_boundaries && layer > 0;
        const Numbers in = passed ? Values(scope.input(m)) : x[at];
        x[at + 1] = Chain::Forward(Values(scope.parameter(chain.weight(layer))), in);
        if (!owns_boundaries || layer == 5) return;
        MutableTensorView out = scope.output(m);
        std::copy(x[at + 1].begin(), x[at + 1].end(), reinterpret_cast<float*>(out.data));
        x[at + 1].clear();
      };
      for (int64_t number = 0; number < 4; ++number) {
        Step step = engine.BeginStep();
        for (int round = 0; round < step.rounds(); ++round) {
          x[0] = Sample(world.rank(), number, round);
          for (int layer = 0; layer < 6; ++layer) {
            forward(step.Forward(UnitId{layer}), layer);
            if (recomputes && layer % 2 == 1) x[static_cast<size_t>(layer)].clear();
          }
          Numbers dy = Distance(x[6], 0.5f);
          for (int layer = 5; layer >= 0; --layer) {
            if (recomputes && layer % 2 == 1) {
              forward(step.Recompute(UnitId{layer - 1}), layer - 1);
              forward(step.Recompute(UnitId{layer}), layer);
            }
            BackwardScope scope = step.Backward(UnitId{layer});
            const ParameterId w = chain.weight(layer);
            const int m = scope.micro_batches().front();
            Numbers in = x[static_cast<size_t>(layer)], dw;
            if (owns_boundaries && layer > 0) in = Values(scope.input(m));
            if (owns_boundaries && layer < 5) dy = Values(scope.output_gradient(m));
            dy = Chain::Backward(Values(scope.parameter(w)), in, dy, dw);
            AddTo(scope.gradient(w), dw);
            if (!owns_boundaries || layer == 0) continue;
            MutableTensorView dx = scope.input_gradient(m);
            std::copy(dy.begin(), dy.end(), reinterpret_cast<float*>(dx.data));
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot end, TakeSnapshot(engine, chain.spec()));
      return std::vector<Snapshot>{std::move(end)};
    };
  };
  for (const bool owns_boundaries : {false, true})
    Compare(/*rounds=*/2, checkpointed(true, owns_boundaries),
            checkpointed(false, owns_boundaries));
}

// Backward adds up the gradients of a block's uses, and hands the sum over in the last of them, as
// autograd does. The others take no gradient. Without that they do, and it is zero.
TEST_P(TrainersTest, OneUseOfASharedBlockTakesItsGradients) {
  const auto shared = [](bool declares) {
    return [declares](World world, const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      const std::vector<int> visits = {0, 1, 1, 1, 2, 0};
      Chain chain("u", 3, visits);
      if (declares)
        for (size_t v : {2, 3, 5}) chain.spec().forward[v].gradients = false;
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), config));
      for (int64_t number = 0; number < 4; ++number) {
        Step step = engine.BeginStep();
        for (int round = 0; round < step.rounds(); ++round) {
          std::vector<Numbers> x = {Sample(world.rank(), number, round)};
          for (int layer : visits) {
            const ForwardScope scope = step.Forward(UnitId{layer});
            x.push_back(Chain::Forward(Values(scope.parameter(chain.weight(layer))), x.back()));
          }
          Numbers dy = Distance(x.back(), 0.5f);
          std::vector<Numbers> sums(3, Numbers(kWidth));
          for (size_t v = visits.size(); v-- > 0;) {
            const size_t layer = static_cast<size_t>(visits[v]);
            const ParameterId w = chain.weight(visits[v]);
            BackwardScope scope = step.Backward(UnitId{visits[v]});
            Numbers dw;
            dy = Chain::Backward(Values(scope.parameter(w)), x[v], dy, dw);
            for (size_t i = 0; i < dw.size(); ++i) sums[layer][i] += dw[i];
            if (v < 2 || v == 4) AddTo(scope.gradient(w), sums[layer]);
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot end, TakeSnapshot(engine, chain.spec()));
      return std::vector<Snapshot>{std::move(end)};
    };
  };
  Compare(/*rounds=*/2, shared(true), shared(false));
}

// A loop ends before its declared number of passes, in each round after another one. The loop's
// gradients are handed over in its last backward, which is that of the first pass. Without that the
// rest of the visits is opened, and computes nothing.
TEST_P(TrainersTest, ALoopThatEndsEarlyHasItsGradients) {
  struct Loop {
    std::vector<int> visits;
    size_t begin, of_pass;  // visits
  };
  constexpr size_t kPasses = 3;
  const auto looped = [](const Loop& loop, bool ends_early) {
    return [loop, ends_early](World world,
                              const Config& config) -> absl::StatusOr<std::vector<Snapshot>> {
      Chain chain("u", 3, loop.visits);
      const size_t end = loop.begin + kPasses * loop.of_pass;
      for (size_t v = loop.begin + loop.of_pass; v < end; ++v)
        chain.spec().forward[v].gradients = false;
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), config));
      for (int64_t number = 0; number < 4; ++number) {
        Step step = engine.BeginStep({.may_leave_out = ends_early});
        for (int round = 0; round < step.rounds(); ++round) {
          const size_t passes = static_cast<size_t>(number + round) % kPasses + 1;
          const auto is_used = [&](size_t v) {
            return v < loop.begin + passes * loop.of_pass || v >= end;
          };
          std::vector<Numbers> x = {Sample(world.rank(), number, round)};
          for (size_t v = 0; v < loop.visits.size(); ++v) {
            x.push_back(x.back());
            if (!is_used(v) && ends_early) continue;
            const ForwardScope scope = step.Forward(UnitId{loop.visits[v]});
            const Numbers w = Values(scope.parameter(chain.weight(loop.visits[v])));
            if (is_used(v)) x.back() = Chain::Forward(w, x.back());
          }
          Numbers dy = Distance(x.back(), 0.5f);
          std::vector<Numbers> sums(3, Numbers(kWidth));
          for (size_t v = loop.visits.size(); v-- > 0;) {
            if (!is_used(v) && ends_early) continue;
            const ParameterId w = chain.weight(loop.visits[v]);
            BackwardScope scope = step.Backward(UnitId{loop.visits[v]});
            if (!is_used(v)) continue;
            Numbers dw;
            dy = Chain::Backward(Values(scope.parameter(w)), x[v], dy, dw);
            Numbers& sum = sums[static_cast<size_t>(loop.visits[v])];
            for (size_t i = 0; i < dw.size(); ++i) sum[i] += dw[i];
            if (chain.spec().forward[v].gradients) AddTo(scope.gradient(w), sum);
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      EBB_ASSIGN_OR_RETURN(Snapshot end_of_run, TakeSnapshot(engine, chain.spec()));
      return std::vector<Snapshot>{std::move(end_of_run)};
    };
  };
  for (const Loop& loop : {Loop{{0, 1, 1, 1, 2}, 1, 1}, Loop{{0, 1, 2, 1, 2, 1, 2}, 1, 2}})
    Compare(/*rounds=*/2, looped(loop, true), looped(loop, false));
}

// Mistakes of a trainer of such a model.
TEST(DeclaredOrderTest, ErrorsNameTheScopeAndWhereTheOrderIsDeclared) {
  using Mistake = std::function<void(Step&, const Chain&)>;
  const auto after = [](const Mistake& mistake) {
    Chain chain("u", 3, {0, 1, 2, 1});
    chain.spec().forward[3].gradients = false;
    Setting setting;
    setting.world = 1;
    setting.stage = 3;
    absl::Status finished;
    const absl::Status run = RunThreads(1, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), chain.spec(), ConfigFor(setting)));
      Step step = engine.BeginStep();
      for (int layer : {0, 1, 2, 1}) step.Forward(UnitId{layer}).Close();
      mistake(step, chain);
      finished = step.Finish();
      return absl::OkStatus();
    });
    EXPECT_TRUE(run.ok()) << run;
    return std::string(finished.message());
  };
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  EXPECT_THAT(
      after([](Step& step, const Chain&) {
        for (int layer : {1, 1, 2}) step.Backward(UnitId{layer}).Close();
      }),
      AllOf(HasSubstr("Backward('u2')"), HasSubstr("was left out"), HasSubstr("ModelSpec::order")));
  EXPECT_THAT(after([](Step& step, const Chain&) {
                for (int layer : {1, 2, 2}) step.Backward(UnitId{layer}).Close();
              }),
              AllOf(HasSubstr("Backward('u2') came once more than declared"),
                    HasSubstr("ModelSpec::order")));
  EXPECT_THAT(after([](Step& step, const Chain& chain) {
                step.Backward(UnitId{1}).gradient(chain.weight(1));
              }),
              AllOf(HasSubstr("the gradient of parameter 'u.w1' in Backward('u1'), visit 3"),
                    HasSubstr("Visit::gradients")));
}

}  // namespace
}  // namespace ebb::testing::trainers_test
