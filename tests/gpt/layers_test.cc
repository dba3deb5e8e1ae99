#include "model/layers.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

using reference::Values;

// A GPT of a few hundred parameters on plain buffers, and the same in fp64.
class TinyGpt {
 public:
  TinyGpt(const Device& device, DType compute, int64_t slots, int64_t context = 5,
          int64_t vocabulary = 256)
      : shape_{.layers = 2, .heads = 2, .width = 16, .context = context, .vocabulary = vocabulary},
        gpt_(Declare({.shape = shape_}, spec_)),
        compute_(compute),
        options_{.compute = compute, .sequences = kSequences, .slots = slots},
        stream_(device.CallerStream()),
        workspace_(*device.Allocate(Layers::WorkspaceBytes(device, shape_, options_),
                                    "the layers' workspace")),
        layers_(*Layers::Create(device, gpt_, options_, workspace_.span())),
        loss_scale_(1) {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const int64_t count = Elements(spec_.parameters[i].shape);
      // Larger than in a real model at its start, so that every gradient affects the loss.
      parameters_.push_back(Array::Random(compute, count, 100 + i, 0.3));
      gradients_.emplace_back(DType::kFloat32, count);
      written_.push_back(false);
    }
    for (int64_t i = 0; i < kSequences * shape_.context; ++i) {
      tokens_.push_back(static_cast<int32_t>(i * 37 % 11));
      targets_.push_back(static_cast<int32_t>(i * 53 % 13));
    }
  }

  // Forward and backward; returns the loss. With recompute the block's slot is filled again before
  // its backward.
  float Train(float loss_scale, bool recompute) {
    loss_scale_[0] = loss_scale;
    const Batch batch = {tokens_.data(), targets_.data(), kSequences, shape_.context};
    const int64_t boundary = kSequences * shape_.context * shape_.width;
    std::vector<Array> x, dx;
    for (int64_t i = 0; i <= shape_.layers; ++i)
      x.emplace_back(compute_, boundary), dx.emplace_back(compute_, boundary);
    const auto parameters = [&](ParameterId id) -> const void* {
      return parameters_[static_cast<size_t>(id)].data();
    };
    const auto gradients = [&](ParameterId id) {
      const size_t i = static_cast<size_t>(id);
      const float beta = written_[i] ? 1.0f : 0.0f;
      written_[i] = true;
      return Target{gradients_[i].data(), DType::kFloat32, beta};
    };
    layers_->Embed(parameters, batch, x[0].data());
    for (int64_t b = 0; b < shape_.layers; ++b) {
      const size_t i = static_cast<size_t>(b);
      layers_->BlockForward(parameters, b, batch, x[i].data(), recompute ? 0 : b, x[i + 1].data());
    }
    const float loss = Host(layers_->HeadBackward(parameters, gradients, batch, x.back().data(),
                                                  loss_scale_.data(), dx.back().data()));
    EXPECT_EQ(loss, Host(layers_->HeadLoss(parameters, batch, x.back().data())));
    for (int64_t b = shape_.layers; b-- > 0;) {
      const size_t i = static_cast<size_t>(b);
      if (recompute) layers_->BlockForward(parameters, b, batch, x[i].data(), 0, nullptr);
      layers_->BlockBackward(parameters, gradients, b, batch, x[i].data(), recompute ? 0 : b,
                             dx[i + 1].data(), dx[i].data());
    }
    layers_->EmbedBackward(gradients, batch, dx[0].data());
    stream_.WaitIdle();  // before the boundaries are freed
    EXPECT_TRUE(layers_->status().ok()) << layers_->status();
    return loss;
  }

  std::vector<Values> ParameterValues() const {
    std::vector<Values> values;
    for (const Array& p : parameters_) values.push_back(p.Values());
    return values;
  }

  double ReferenceLoss(const std::vector<Values>& p) const {
    const auto at = [&p](ParameterId id) -> const Values& { return p[static_cast<size_t>(id)]; };
    const int64_t context = shape_.context;
    Values logits;
    for (int64_t s = 0; s < kSequences; ++s) {
      Values x;
      for (int64_t t = 0; t < context; ++t) {
        for (int64_t c = 0; c < shape_.width; ++c) {
          const int64_t token = tokens_[static_cast<size_t>(s * context + t)];
          x.push_back(at(gpt_.tokens)[static_cast<size_t>(token * shape_.width + c)] +
                      at(gpt_.positions)[static_cast<size_t>(t * shape_.width + c)]);
        }
      }
      const auto add = [&x](const Values& y) {
        std::transform(x.begin(), x.end(), y.begin(), x.begin(), std::plus<>());
      };
      for (const BlockIds& b : gpt_.blocks) {
        const Values qkv =
            reference::Linear(reference::Norm(x, at(b.norm1.weight), at(b.norm1.bias)),
                              at(b.qkv.weight), at(b.qkv.bias), context);
        add(reference::Linear(reference::Attention(qkv, context, shape_.heads),
                              at(b.projection.weight), at(b.projection.bias), context));
        Values hidden = reference::Linear(reference::Norm(x, at(b.norm2.weight), at(b.norm2.bias)),
                                          at(b.up.weight), at(b.up.bias), context);
        std::transform(hidden.begin(), hidden.end(), hidden.begin(), reference::Gelu);
        add(reference::Linear(hidden, at(b.down.weight), at(b.down.bias), context));
      }
      const Values row =
          reference::Matmul(reference::Norm(x, at(gpt_.norm.weight), at(gpt_.norm.bias)), false,
                            at(gpt_.tokens), true, context, shape_.vocabulary, shape_.width);
      logits.insert(logits.end(), row.begin(), row.end());
    }
    return reference::CrossEntropy(logits, {targets_.begin(), targets_.end()});
  }

  // The logits of the last position.
  std::vector<float> Logits() {
    Array x(compute_, kSequences * shape_.context * shape_.width);
    const Batch batch = {tokens_.data(), targets_.data(), 1, shape_.context};
    const auto parameters = [&](ParameterId id) -> const void* {
      return parameters_[static_cast<size_t>(id)].data();
    };
    layers_->Embed(parameters, batch, x.data());
    const std::span<const float> logits = layers_->LastLogits(parameters, batch, x.data());
    return {logits.begin(), logits.end()};
  }

  Layers& layers() { return *layers_; }
  const ModelSpec& spec() const { return spec_; }
  const std::vector<Array>& gradients() const { return gradients_; }

 private:
  static constexpr int64_t kSequences = 2;

  float Host(const float* number) {
    Array copy(DType::kFloat32, 1);
    stream_.Copy(copy.data(), number, sizeof(float));
    stream_.WaitIdle();
    return static_cast<float>(copy[0]);
  }

  const GptShape shape_;
  ModelSpec spec_;
  const Gpt gpt_;
  const DType compute_;
  const Layers::Options options_;
  Stream stream_;
  Buffer workspace_;
  std::unique_ptr<Layers> layers_;
  std::vector<Array> parameters_, gradients_;
  std::vector<bool> written_;
  std::pmr::vector<int32_t> tokens_, targets_;
  std::pmr::vector<float> loss_scale_;
};

// The gradient of parameter `i` along `direction` against a difference quotient of the fp64 model.
void ExpectSlope(const TinyGpt& gpt, double loss_scale, size_t i, const Values& direction) {
  const std::vector<Values> values = gpt.ParameterValues();
  double measured[2];
  constexpr double kStep = 1e-5;
  for (int side : {0, 1}) {
    std::vector<Values> moved = values;
    for (size_t j = 0; j < direction.size(); ++j)
      moved[i][j] += (side == 0 ? -kStep : kStep) * direction[j];
    measured[side] = gpt.ReferenceLoss(moved);
  }
  double dot = 0, size = 0;
  for (size_t j = 0; j < direction.size(); ++j) {
    const double gradient = gpt.gradients()[i][static_cast<int64_t>(j)];
    dot += gradient * direction[j], size += gradient * gradient;
  }
  // fp32 sums against fp64: some 2^-24 each of a few hundred terms; the difference quotient adds
  // 1e-9.
  const double slope = loss_scale * (measured[1] - measured[0]) / (2 * kStep);
  EXPECT_NEAR(dot, slope, 2e-5 * std::sqrt(size) + 1e-6) << gpt.spec().parameters[i].name;
  EXPECT_GT(size, 0) << gpt.spec().parameters[i].name;
}

Values RandomDirection(size_t size, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  Values direction(size);
  for (double& d : direction) d = normal(random);
  return direction;
}

using LayersTest = OpsTest;

TEST_P(LayersTest, LossAndEveryGradientAgreeWithFiniteDifferencesOfAnFp64Model) {
  if (Compute() != DType::kFloat32) GTEST_SKIP() << "16 bits are too few for a difference quotient";
  TinyGpt gpt(NewDevice(1), DType::kFloat32, 2);
  constexpr float kScale = 4;
  const std::vector<Values> values = gpt.ParameterValues();
  EXPECT_NEAR(gpt.Train(kScale, /*recompute=*/false), gpt.ReferenceLoss(values), 1e-5);
  std::mt19937_64 random(7);
  for (size_t i = 0; i < values.size(); ++i) {
    Values one(values[i].size());
    one[random() % one.size()] = 1;
    ExpectSlope(gpt, kScale, i, one);
    ExpectSlope(gpt, kScale, i, RandomDirection(values[i].size(), random));
  }
}

TEST_P(LayersTest, RecomputingInOneSlotGivesTheSameBits) {
  TinyGpt keeps(NewDevice(1), Compute(), 2), again(NewDevice(1), Compute(), 1);
  EXPECT_EQ(keeps.Train(1, false), again.Train(1, true));
  EXPECT_EQ(keeps.gradients(), again.gradients());
}

TEST_P(LayersTest, ASecondMicroBatchAddsToTheGradients) {
  TinyGpt once(NewDevice(2), Compute(), 2), twice(NewDevice(2), Compute(), 2);
  once.Train(1, false);
  twice.Train(1, false);
  twice.Train(1, false);
  for (size_t i = 0; i < once.gradients().size(); ++i) {
    std::vector<double> doubled = once.gradients()[i].Values();
    for (double& d : doubled) d *= 2;
    ExpectClose(twice.gradients()[i], doubled, 1e-6, once.spec().parameters[i].name);
  }
}

TEST_P(LayersTest, TheModelFollowsTheFp64One) {
  TinyGpt gpt(NewDevice(1), Compute(), 2);
  // Activations rounded some twenty times on the way.
  EXPECT_NEAR(gpt.Train(1, false), gpt.ReferenceLoss(gpt.ParameterValues()),
              std::max(20 * Rounding(Compute()), 1e-5));
}

TEST_P(LayersTest, LogitsToSampleFromComeBackToTheHost) {
  TinyGpt gpt(NewDevice(1), Compute(), 2);
  const std::vector<float> logits = gpt.Logits();
  ASSERT_EQ(logits.size(), 256u);
  EXPECT_TRUE(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }));
  EXPECT_NE(logits.front(), logits.back());
}

// So many rows, or so large a vocabulary, that the head takes three chunks on the CPU, two on a
// GPU.
TEST_P(LayersTest, TheHeadsChunksAddUp) {
  if (Compute() != DType::kFloat32) GTEST_SKIP() << "what fp32 shows holds for 16 bits";
  TinyGpt gpt(NewDevice(1), DType::kFloat32, 2, /*context=*/OnCuda() ? 140 : 70,
              /*vocabulary=*/OnCuda() ? 300 : 70'000);
  const std::vector<Values> values = gpt.ParameterValues();
  EXPECT_NEAR(gpt.Train(1, false), gpt.ReferenceLoss(values), 1e-4);
  std::mt19937_64 random(7);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string& name = gpt.spec().parameters[i].name;
    if (name == "embedding.tokens" || name == "final_norm.weight") {
      ExpectSlope(gpt, 1, i, RandomDirection(values[i].size(), random));
    }
  }
}

// Attention in three blocks of queries, the last one shorter; a head of two chunks.
TEST_P(LayersTest, AStepNeedsNothingThatWasNotPrepared) {
  if (OnCuda()) GTEST_SKIP() << "there is nothing to make on a GPU";
  for (const int threads : {1, 3}) {
    TinyGpt gpt(NewDevice(threads), Compute(), 2, /*context=*/150, /*vocabulary=*/20'000);
    const absl::Status prepared = gpt.layers().Prepare(DType::kFloat32);
    ASSERT_TRUE(prepared.ok()) << prepared;
    gpt.Train(1, /*recompute=*/false);
    gpt.Train(1, /*recompute=*/true);
    EXPECT_EQ(gpt.layers().unprepared(), 0);
  }
  TinyGpt gpt(NewDevice(1), Compute(), 2);
  gpt.Train(1, false);
  EXPECT_GT(gpt.layers().unprepared(), 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, LayersTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
