#include "tests/engine/toy_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::testing {
namespace {

void Round(DType dtype, std::span<float> values) {
  for (float& value : values) {
    if (dtype == DType::kBFloat16) value = static_cast<float>(BFloat16(value));
    if (dtype == DType::kFloat16) value = static_cast<float>(Float16(value));
  }
}

// A boundary may hold more elements than were asked for: its size is in bytes of the widest dtype.
void Write(const MutableTensorView& view, std::span<const float> values) {
  WithNumbers(view, [&](auto elements) {
    using T = typename decltype(elements)::value_type;
    for (size_t i = 0; i < std::min(elements.size(), values.size()); ++i)
      elements[i] = T(values[i]);
  });
}

std::vector<float> FirstValues(const Reach& reach, const TensorView& view, size_t count) {
  std::vector<float> values = reach.Values(view);
  values.resize(count);
  return values;
}

}  // namespace

float ToyInput(int rank, int64_t step, int micro_batch, size_t i) {
  return std::sin(0.37f * static_cast<float>(i + 1) + 1.3f * static_cast<float>(rank) +
                  0.11f * static_cast<float>(step) + 2.1f * static_cast<float>(micro_batch));
}

float ToyTarget(int rank, int64_t step, size_t i) {
  return std::cos(0.2f * static_cast<float>(i) + static_cast<float>(rank + step));
}

absl::Status ToyBytes(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((37 * (slice.begin + static_cast<int64_t>(i)) + 200) % 256);
  return absl::OkStatus();
}

ToyModel::ToyModel(ToyOptions options, const Device& device) : options_(options), reach_(device) {
  const int64_t n = options.width;
  for (int l = 0; l < options.layers; ++l) {
    const UnitId unit = spec_.AddUnit(absl::StrCat("layer", l));
    const bool trainable = l > 0 || !options.frozen_first;
    Layer layer;
    // Another height for each layer would break the chain; another number of parameters per unit
    // keeps sizes odd.
    layer.weight = spec_.Add(unit, {.name = absl::StrCat("w", l),
                                    .shape = {n, n},
                                    .init = Normal(0.3f, options.seed),
                                    .trainable = trainable});
    if (l % 2 == 0)
      layer.bias = spec_.Add(unit, {.name = absl::StrCat("b", l),
                                    .shape = {n},
                                    .init = Constant(0.01f),
                                    .trainable = trainable,
                                    .group = options.groups ? "bias" : ""});
    if (options.frozen && l % 3 != 2)
      layer.scale = spec_.Add(
          unit,
          {.name = absl::StrCat("s", l), .shape = {n}, .init = Constant(1.5f), .trainable = false});
    if (options.own_dtypes && layer.bias)
      spec_.parameters[static_cast<size_t>(*layer.bias)].compute = DType::kFloat32;
    if (options.own_dtypes && layer.scale) {
      ParameterSpec& scale = spec_.parameters[static_cast<size_t>(*layer.scale)];
      scale.compute = DType::kInt8;
      scale.init = ToyBytes;
    }
    layers_.push_back(layer);
  }
  for (int l = 0; l < options.layers; ++l) spec_.forward.push_back({.unit = UnitId{l}});
  if (options.tied) spec_.forward.push_back({.unit = UnitId{0}});
  if (options.boundaries) {
    for (size_t v = 0; v + 1 < spec_.forward.size(); ++v) spec_.forward[v].output_bytes = n * 4;
  }
}

std::vector<float> Values(const TensorView& view) {
  std::vector<float> values;
  if (view.dtype == DType::kInt8) {
    for (int8_t byte : view.as<int8_t>()) values.push_back(static_cast<uint8_t>(byte));
    return values;
  }
  WithNumbers(view, [&](auto elements) {
    for (auto element : elements) values.push_back(static_cast<float>(element));
  });
  return values;
}

void AddTo(const MutableTensorView& view, std::span<const float> values) {
  WithNumbers(view, [&](auto elements) {
    using T = typename decltype(elements)::value_type;
    for (size_t i = 0; i < elements.size(); ++i)
      elements[i] = T(static_cast<float>(elements[i]) + values[i]);
  });
}

struct Reach::Far {
  explicit Far(const Device& device)
      : stream(device.CallerStream()),
        waiter(*Device::Cpu(1).NewStream("waiter")),
        scalar(*device.Allocate(sizeof(float), "a loss")) {}
  // A trainer's kernels would not wait. A copy of pageable memory does wait, inside the driver.
  // Another rank of this process may then be blocked before it enqueues the gather that is waited
  // for. So the host waits for the gather first. The check of the order of streams
  // (tests/cuda/stand_in/order.h) counts a wait for its own thread alone.
  void Copy(void* to, const void* from, int64_t bytes) {
    Wait();
    stream.Copy(to, from, bytes);
    Wait();
  }
  void Wait() {
    waiter.Enqueue([this] { stream.WaitIdle(); });
    waiter.WaitIdle();
  }

  Stream stream, waiter;
  Buffer scalar;  // calls that read it are in the order of the stream
};

Reach::Reach(const Device& device)
    : far_(device.kind() == DeviceKind::kCpu ? nullptr : std::make_shared<Far>(device)) {}

std::vector<float> Reach::Values(const TensorView& view) const {
  if (far_ == nullptr) return testing::Values(view);
  std::vector<std::byte> near(static_cast<size_t>(view.size() * SizeOf(view.dtype)));
  far_->Copy(near.data(), view.data, static_cast<int64_t>(near.size()));
  return testing::Values({.data = near.data(), .dtype = view.dtype, .shape = view.shape});
}

void Reach::AddTo(const MutableTensorView& view, std::span<const float> values) const {
  if (far_ == nullptr) return testing::AddTo(view, values);
  std::vector<float> sums = Values({.data = view.data, .dtype = view.dtype, .shape = view.shape});
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  Write(view, sums);
}

void Reach::Write(const MutableTensorView& view, std::span<const float> values) const {
  if (far_ == nullptr) return testing::Write(view, values);
  std::vector<std::byte> near(static_cast<size_t>(view.size() * SizeOf(view.dtype)));
  testing::Write({.data = near.data(), .dtype = view.dtype, .shape = view.shape}, values);
  far_->Copy(view.data, near.data(), static_cast<int64_t>(near.size()));
}

TensorView Reach::Scalar(const float& value) const {
  if (far_ == nullptr) return {.data = &value};
  far_->Copy(far_->scalar.data(), &value, sizeof(value));
  return {.data = far_->scalar.data()};
}

std::vector<float>& ToyModel::Kept(int micro_batch, int visit) {
  if (kept_.size() <= static_cast<size_t>(micro_batch))
    kept_.resize(static_cast<size_t>(micro_batch) + 1);
  auto& outputs = kept_[static_cast<size_t>(micro_batch)];
  outputs.resize(spec_.forward.size());
  return outputs[static_cast<size_t>(visit)];
}

// The output of the visit before; for the first visit, the sample.
std::vector<float> ToyModel::InputOf(const Scope& scope, int visit, int rank, int64_t step,
                                     int micro_batch) {
  std::vector<float> x(static_cast<size_t>(options_.width));
  if (visit == 0) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = ToyInput(rank, step, micro_batch, i);
    return x;
  }
  if (options_.boundaries) return FirstValues(reach_, scope.input(micro_batch), x.size());
  x = Kept(micro_batch, visit - 1);
  x.resize(static_cast<size_t>(options_.width));
  return x;
}

ToyModel::Weights ToyModel::WeightsOf(const Scope& scope, int visit) const {
  const size_t n = static_cast<size_t>(options_.width);
  const Layer& parameters = layer(visit);
  const TensorView weight = scope.parameter(parameters.weight);
  Weights weights{.w = reach_.Values(weight),
                  .b = std::vector<float>(n),
                  .s = std::vector<float>(n, 1.0f),
                  .dtype = weight.dtype};
  if (parameters.bias) weights.b = reach_.Values(scope.parameter(*parameters.bias));
  if (parameters.scale) {
    const TensorView scale = scope.parameter(*parameters.scale);
    weights.s = reach_.Values(scale);
    for (float& value : weights.s)
      if (scale.dtype == DType::kInt8) value = 0.5f + value / 256;  // the meaning of the bytes
  }
  weights.complete = weights.w.size() == n * n && weights.b.size() == n && weights.s.size() == n;
  return weights;
}

void ToyModel::Compute(const Weights& weights, std::span<const float> x, std::span<float> y) const {
  const size_t n = x.size();
  for (size_t o = 0; o < n; ++o) {
    float sum = weights.b[o];
    for (size_t k = 0; k < n; ++k) sum += weights.w[o * n + k] * x[k];
    y[o] = weights.s[o] * std::tanh(sum);
  }
}

void ToyModel::Forward(Step& step, int visit, int rank, int64_t number) {
  ForwardScope scope = step.Forward(unit(visit));
  const Weights weights = WeightsOf(scope, visit);
  if (!weights.complete) return;
  for (int m : scope.micro_batches()) {
    const std::vector<float> x = InputOf(scope, visit, rank, number, m);
    std::vector<float>& y = Kept(m, visit);
    y.resize(x.size());
    Compute(weights, x, y);
    Round(weights.dtype, y);
    reach_.Write(scope.output(m), y);
  }
}

void ToyModel::Backward(Step& step, int visit, int rank, int64_t number, bool blow_up) {
  BackwardScope scope = step.Backward(unit(visit));
  const Weights weights = WeightsOf(scope, visit);
  if (!weights.complete) return;
  const size_t n = static_cast<size_t>(options_.width);
  for (int m : scope.micro_batches()) {
    const std::vector<float> x = InputOf(scope, visit, rank, number, m);
    std::vector<float> y(n);
    Compute(weights, x, y);
    if (flow_.size() <= static_cast<size_t>(m)) flow_.resize(static_cast<size_t>(m) + 1);
    std::vector<float>& dy = flow_[static_cast<size_t>(m)];
    if (visit + 1 == visits()) {
      float loss = 0;
      const float scale = reach_.Values(step.device_loss_scale()).front();
      dy.assign(n, 0);
      for (size_t o = 0; o < n; ++o) {
        const float error = y[o] - ToyTarget(rank, number, o);
        loss += error * error / static_cast<float>(n);
        dy[o] = 2 * error / static_cast<float>(n) * scale;
        if (blow_up) dy[o] *= std::numeric_limits<float>::infinity();
      }
      step.AddLoss(reach_.Scalar(loss));
    } else if (options_.boundaries) {
      dy = FirstValues(reach_, scope.output_gradient(m), n);
    }
    dy.resize(n);
    std::vector<float> dx(n), dw(n * n), db(n);
    for (size_t o = 0; o < n; ++o) {
      const float t = y[o] / weights.s[o];
      const float d = dy[o] * weights.s[o] * (1 - t * t);
      db[o] = d;
      for (size_t k = 0; k < n; ++k) {
        dw[o * n + k] = d * x[k];
        dx[k] += d * weights.w[o * n + k];
      }
    }
    const auto add = [&](ParameterId p, std::span<const float> gradient) {
      if (spec_[p].trainable) reach_.AddTo(scope.gradient(p), gradient);
    };
    add(layer(visit).weight, dw);
    if (layer(visit).bias) add(*layer(visit).bias, db);
    Round(weights.dtype, dx);
    reach_.Write(scope.input_gradient(m), dx);
    dy = dx;
  }
}

absl::Status ToyModel::Train(Engine& engine, int rank, int64_t number, StepOptions options,
                             bool blow_up) {
  Step step = engine.BeginStep(options);
  const int first = options_.frozen_first ? 1 : 0;  // backward ends at the first trainable visit
  for (int round = 0; round < step.rounds(); ++round) {
    for (int v = 0; v < visits(); ++v) Forward(step, v, rank, number);
    for (int v = visits() - 1; v >= first; --v) Backward(step, v, rank, number, blow_up);
  }
  if (options.hold_updates) {
    if (absl::Status status = step.Reduce(); !status.ok()) return status;
  }
  return step.Finish();
}

absl::StatusOr<double> ToyModel::Evaluate(Engine& engine, int rank, int micro_batches) {
  Evaluation evaluation = engine.BeginEvaluation(micro_batches);
  for (int v = 0; v < visits(); ++v) {
    ForwardScope scope = evaluation.Forward(unit(v));
    const Weights weights = WeightsOf(scope, v);
    if (!weights.complete) continue;
    for (int m : scope.micro_batches()) {
      const std::vector<float> x = InputOf(scope, v, rank, /*step=*/-1, m);
      std::vector<float>& y = Kept(m, v);
      y.resize(x.size());
      Compute(weights, x, y);
      Round(weights.dtype, y);
      reach_.Write(scope.output(m), y);
      if (v + 1 < visits()) continue;
      float loss = 0;
      for (float value : y) loss += value * value;
      evaluation.AddLoss(reach_.Scalar(loss));
    }
  }
  return evaluation.Finish();
}

absl::StatusOr<std::vector<uint32_t>> MasterBits(Engine& engine, const ModelSpec& model) {
  std::vector<uint32_t> bits;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    std::vector<float> whole(static_cast<size_t>(Elements(model.parameters[p].shape)));
    if (absl::Status status =
            engine.Gather(ParameterId{static_cast<int32_t>(p)}, StateClass::kMaster, whole);
        !status.ok()) {
      return status;
    }
    for (float value : whole) bits.push_back(std::bit_cast<uint32_t>(value));
  }
  return bits;
}

absl::StatusOr<std::vector<uint32_t>> TrainedMasterBits(int world, const ToyModel& model,
                                                        const Config& config, int steps) {
  std::vector<uint32_t> bits;
  const absl::Status status = RunThreads(world, [&](World ranks) -> absl::Status {
    ToyModel own = model;
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(ranks, Device::Cpu(1), own.spec(), config));
    for (int step = 0; step < steps; ++step)
      EBB_RETURN_IF_ERROR(own.Train(engine, ranks.rank(), step));
    EBB_ASSIGN_OR_RETURN(std::vector<uint32_t> masters, MasterBits(engine, own.spec()));
    if (ranks.rank() == 0) bits = std::move(masters);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return bits;
}

}  // namespace ebb::testing
