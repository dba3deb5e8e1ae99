#include "bare_trainer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ebb/optim/cast.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/update.h"

namespace ebb::bench {
namespace {

constexpr int64_t kSkew =
    69'888;  // bytes; arrays read together must not start at the same offset of a huge page

}  // namespace

BareTrainer::BareTrainer(const Options& options, const gpt::Text& text)
    : options_(options),
      text_(text),
      device_(Device::Cpu(options.threads)),
      stream_(device_.CallerStream()) {
  const int64_t rows = options.sequences * options.shape.context;
  gpt_ = gpt::Declare({.shape = options.shape,
                       .seed = options.seed,
                       .boundary_bytes = rows * options.shape.width * SizeOf(options.compute)},
                      model_);
  layout_ = *sharding::LayOut(model_, /*world=*/1);
  for (const sharding::UnitLayout& unit : layout_.units) {
    unit_offsets_.push_back(elements_);
    elements_ += unit.elements();
  }
  const int64_t tied = layout_.units[static_cast<size_t>(gpt_.embedding)].elements();
  const auto allocate = [&](int64_t bytes) {
    return *device_.Allocate(bytes + 8 * kSkew, "a bare trainer's array");
  };
  parameters_ = allocate(elements_ * SizeOf(options.compute));
  masters_ = allocate(elements_ * 4);
  gradients_ = allocate((elements_ + tied) * SizeOf(options.compute));
  summed_ = allocate(elements_ * 4);
  momentum_ = allocate(elements_ * 4);
  variance_ = allocate(elements_ * 4);
  norm_scratch_.resize(static_cast<size_t>(optim::NormBlocks(elements_)));
  written_.resize(2 * model_.parameters.size());

  float* const masters = reinterpret_cast<float*>(masters_.data() + kSkew);
  for (size_t p = 0; p < model_.parameters.size(); ++p) {
    const ParameterSpec& spec = model_.parameters[p];
    const ParameterId id{static_cast<int32_t>(p)};
    const int64_t count = Elements(spec.shape);
    const Slice slice{
        .parameter = id, .name = spec.name, .shape = spec.shape, .begin = 0, .end = count};
    (void)spec.init(slice, {masters + OffsetOf(id), static_cast<size_t>(count)});
  }
  if (options.compute != DType::kFloat32) {
    optim::Cast(stream_.team(), masters, DType::kFloat32, parameters_.data(), options.compute,
                elements_, optim::Rounding::kParameter);
  }
  const gpt::Layers::Options layers{.compute = options.compute,
                                    .threads = options.threads,
                                    .sequences = options.sequences,
                                    .slots = options.shape.layers};
  workspace_ = *device_.Allocate(gpt::Layers::WorkspaceBytes(options.shape, layers),
                                 "a bare trainer's workspace");
  layers_ = std::make_unique<gpt::Layers>(gpt_, layers, workspace_.span());
  tokens_.resize(static_cast<size_t>(rows));
  targets_.resize(static_cast<size_t>(rows));
  const size_t boundary = static_cast<size_t>(rows * options.shape.width * SizeOf(options.compute));
  boundaries_.resize(boundary * static_cast<size_t>(options.shape.layers + 1));
  boundary_gradients_.resize(boundary * 2);
}

int64_t BareTrainer::OffsetOf(ParameterId p) const {
  const sharding::ParameterLocation& location = layout_.parameters[static_cast<size_t>(p)];
  return unit_offsets_[static_cast<size_t>(location.unit)] + location.offset;
}

const void* BareTrainer::Parameter(ParameterId p) const {
  if (options_.compute == DType::kFloat32) return masters_.data() + kSkew + OffsetOf(p) * 4;
  return parameters_.data() + OffsetOf(p) * SizeOf(options_.compute);
}

// The head's visit of the tied unit has a gradient of its own, as each visit is reduced on its own.
gpt::Target BareTrainer::Gradient(ParameterId p, bool head) {
  const sharding::ParameterLocation& location = layout_.parameters[static_cast<size_t>(p)];
  const int64_t offset = head ? elements_ + location.offset : OffsetOf(p);
  const size_t index = static_cast<size_t>(p) + (head ? model_.parameters.size() : 0);
  const bool first = !written_[index];
  written_[index] = true;
  return {gradients_.data() + kSkew + offset * SizeOf(options_.compute), options_.compute,
          first ? 0.0f : 1.0f};
}

float BareTrainer::Step(int64_t step) {
  const size_t length = static_cast<size_t>(options_.shape.context);
  for (int64_t s = 0; s < options_.sequences; ++s) {
    const size_t at = static_cast<size_t>(s) * length;
    text_.Training(options_.seed, static_cast<uint64_t>(step * options_.sequences + s),
                   std::span(tokens_).subspan(at, length), std::span(targets_).subspan(at, length));
  }
  const gpt::Batch batch{.tokens = tokens_, .targets = targets_, .sequences = options_.sequences};
  const size_t boundary = boundary_gradients_.size() / 2;
  const int64_t blocks = options_.shape.layers;
  const auto input = [&](int64_t block) {
    return boundaries_.data() + boundary * static_cast<size_t>(block);
  };
  const auto flow = [&](int64_t block) {
    return boundary_gradients_.data() + boundary * static_cast<size_t>(block % 2);
  };
  const auto parameters = [&](ParameterId p) { return Parameter(p); };
  const auto gradients = [&](ParameterId p) { return Gradient(p, /*head=*/false); };
  const auto head_gradients = [&](ParameterId p) { return Gradient(p, /*head=*/true); };

  std::fill(written_.begin(), written_.end(), false);
  layers_->Embed(parameters, batch, input(0));
  for (int64_t b = 0; b < blocks; ++b)
    layers_->BlockForward(parameters, b, batch, input(b), b, input(b + 1));
  const float loss = layers_->HeadBackward(parameters, head_gradients, batch, input(blocks),
                                           /*loss_scale=*/1, flow(blocks));
  for (int64_t b = blocks; b-- > 0;)
    layers_->BlockBackward(parameters, gradients, b, batch, input(b), b, flow(b + 1), flow(b));
  layers_->EmbedBackward(gradients, batch, flow(0));
  Update();
  return loss;
}

void BareTrainer::Update() {
  // What no kernel wrote is zero.
  const int64_t size = SizeOf(options_.compute);
  for (size_t index = 0; index < written_.size(); ++index) {
    const bool head = index >= model_.parameters.size();
    const ParameterId p{static_cast<int32_t>(index % model_.parameters.size())};
    const sharding::ParameterLocation& location = layout_.parameters[static_cast<size_t>(p)];
    if (written_[index] || (head && location.unit != static_cast<int>(gpt_.embedding))) continue;
    std::memset(Gradient(p, head).data, 0, static_cast<size_t>(location.elements * size));
  }
  double squares = 0;
  std::byte* const gradients = gradients_.data() + kSkew;
  std::byte* const summed = summed_.data() + 2 * kSkew;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int64_t count = layout_.units[u].elements();
    const std::byte* const own = gradients + unit_offsets_[u] * size;
    if (u == static_cast<size_t>(gpt_.embedding)) {
      optim::Accumulate(stream_.team(), {.source = gradients + elements_ * size,
                                         .source_dtype = options_.compute,
                                         .destination = summed,
                                         .destination_dtype = DType::kFloat32,
                                         .count = count,
                                         .add = false});
      squares += optim::AccumulateAndSumSquares(stream_.team(),
                                                {.source = own,
                                                 .source_dtype = options_.compute,
                                                 .destination = summed,
                                                 .destination_dtype = DType::kFloat32,
                                                 .count = count,
                                                 .add = true},
                                                norm_scratch_);
    } else {
      squares += optim::SumOfSquares(stream_.team(), own, options_.compute, count, norm_scratch_);
    }
  }
  const double norm = std::sqrt(squares);
  double factor = 1;
  if (options_.gradient_clipping > 0)
    factor /= std::max(1.0, (norm + 1e-6) / options_.gradient_clipping);
  const optim::UpdateScalars scalars{.step = ++updates_,
                                     .learning_rate = options_.optimizer.learning_rate,
                                     .gradient_factor = static_cast<float>(factor)};
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int64_t offset = unit_offsets_[u];
    const bool tied = u == static_cast<size_t>(gpt_.embedding);
    optim::UpdateArrays arrays{.master = reinterpret_cast<float*>(masters_.data() + kSkew) + offset,
                               .gradient = tied ? summed : gradients + offset * size,
                               .gradient_dtype = tied ? DType::kFloat32 : options_.compute,
                               .parameter = options_.compute == DType::kFloat32
                                                ? nullptr
                                                : parameters_.data() + offset * size,
                               .parameter_dtype = options_.compute,
                               .count = layout_.units[u].elements()};
    arrays.states[0] = reinterpret_cast<float*>(momentum_.data() + 3 * kSkew) + offset;
    arrays.states[1] = reinterpret_cast<float*>(variance_.data() + 4 * kSkew) + offset;
    optim::Update(stream_.team(), options_.optimizer, arrays, scalars);
  }
}

std::vector<float> BareTrainer::Masters() const {
  std::vector<float> values;
  for (size_t p = 0; p < model_.parameters.size(); ++p) {
    const ParameterId id{static_cast<int32_t>(p)};
    const float* const begin =
        reinterpret_cast<const float*>(masters_.data() + kSkew) + OffsetOf(id);
    values.insert(values.end(), begin, begin + Elements(model_.parameters[p].shape));
  }
  return values;
}

}  // namespace ebb::bench
