#include "bare_trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <new>

#include "absl/strings/str_cat.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::bench {
namespace {

// Bytes. Arrays that are read together must not start at the same offset of a huge page.
constexpr int64_t kSkew = 69'888;

float* Floats(const Buffer& buffer, int64_t skews, int64_t element) {
  return reinterpret_cast<float*>(buffer.data() + skews * kSkew) + element;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BareTrainer>> BareTrainer::Create(const Device& device,
                                                                 const Options& options,
                                                                 const gpt::Text& text) {
  std::unique_ptr<BareTrainer> trainer(new BareTrainer(device, options, text));
  EBB_RETURN_IF_ERROR(trainer->MakeArrays());
  EBB_RETURN_IF_ERROR(trainer->MakeMasters());
  return trainer;
}

BareTrainer::BareTrainer(const Device& device, const Options& options, const gpt::Text& text)
    : options_(options),
      text_(text),
      device_(device),
      stream_(device.CallerStream()),
      boundary_bytes_(options.sequences * options.shape.context * options.shape.width *
                      SizeOf(options.compute)) {
  gpt_ = gpt::Declare(
      {.shape = options.shape, .seed = options.seed, .boundary_bytes = boundary_bytes_}, model_);
  written_.resize(2 * model_.parameters.size());
}

absl::Status BareTrainer::MakeArrays() {
  EBB_ASSIGN_OR_RETURN(layout_, sharding::LayOut(model_, /*world=*/1));
  for (const sharding::UnitLayout& unit : layout_.units) {
    unit_offsets_.push_back(elements_);
    elements_ += unit.elements();
  }
  EBB_ASSIGN_OR_RETURN(kernels_, optim::Kernels::For(device_));
  const int64_t tied = layout_.units[static_cast<int>(gpt_.embedding)].elements();
  const int64_t rows = options_.sequences * options_.shape.context;
  const int64_t size = SizeOf(options_.compute), fp32 = int64_t{sizeof(float)};
  const gpt::Layers::Options layers{
      .compute = options_.compute, .sequences = options_.sequences, .slots = options_.shape.layers};
  const int64_t batch_bytes = gpt::Batches::DeviceBytes(1, rows);
  const int64_t layer_bytes = gpt::Layers::WorkspaceBytes(device_, options_.shape, layers);
  struct Wanted {
    Buffer& buffer;
    int64_t bytes;
  };
  for (const Wanted& wanted :
       {Wanted{parameters_, elements_ * size}, Wanted{masters_, elements_ * fp32},
        Wanted{gradients_, (elements_ + tied) * size}, Wanted{summed_, tied * fp32},
        Wanted{momentum_, elements_ * fp32}, Wanted{variance_, elements_ * fp32},
        Wanted{workspace_, batch_bytes + layer_bytes},
        Wanted{boundaries_, boundary_bytes_ * (options_.shape.layers + 1)},
        Wanted{boundary_gradients_, boundary_bytes_ * 2},
        Wanted{norm_blocks_, optim::NormBlocks(elements_) * int64_t{sizeof(double)}}}) {
    EBB_ASSIGN_OR_RETURN(wanted.buffer,
                         device_.Allocate(wanted.bytes + 8 * kSkew, "a bare trainer's array"));
  }
  const auto cut = static_cast<size_t>(batch_bytes);
  EBB_ASSIGN_OR_RETURN(batches_,
                       gpt::Batches::Create(device_, 1, rows, workspace_.span().first(cut)));
  EBB_ASSIGN_OR_RETURN(layers_,
                       gpt::Layers::Create(device_, gpt_, layers, workspace_.span().subspan(cut)));
  return absl::OkStatus();
}

absl::Status BareTrainer::MakeMasters() {
  constexpr int64_t kLine = 64;
  const int64_t squares = static_cast<int64_t>(layout_.units.size() * sizeof(double));
  const int64_t begin = (squares / kLine + 1) * kLine + 5 * kLine;
  EBB_ASSIGN_OR_RETURN(shared_memory_,
                       device_.AllocateShared(begin + kPieceMax * int64_t{sizeof(float)},
                                              "a bare trainer's masters on the host"));
  std::byte* const memory = shared_memory_.data();
  shared_.squares = {reinterpret_cast<double*>(memory), layout_.units.size()};
  shared_.loss_scale = reinterpret_cast<float*>(memory + begin - 5 * kLine);
  *shared_.loss_scale = 1;
  EBB_ASSIGN_OR_RETURN(constants_, device_.Allocate(sizeof(optim::UpdateConstants),
                                                    "a bare trainer's constants of updates"));
  shared_.constants = new (memory + begin - 4 * kLine) optim::UpdateConstants();
  static_assert(sizeof(optim::UpdateConstants) <= 4 * kLine);
  shared_.staging = reinterpret_cast<float*>(memory + begin);

  for (size_t p = 0; p < model_.parameters.size(); ++p)
    EBB_RETURN_IF_ERROR(FillMasters(ParameterId{static_cast<int32_t>(p)}));
  if (options_.compute != DType::kFloat32) {
    kernels_->Cast(stream_, Floats(masters_, 1, 0), DType::kFloat32, parameters_.data(),
                   options_.compute, elements_, optim::Rounding::kParameter);
  }
  stream_.WaitIdle();
  return device_.status();
}

// Fills piece by piece, each with all of the device's threads. One thread would take minutes for a
// large model.
absl::Status BareTrainer::FillMasters(ParameterId p) {
  constexpr int64_t kGrain = 4096;
  const ParameterSpec& spec = model_[p];
  const int64_t elements = Elements(spec.shape);
  for (int64_t first = 0; first < elements; first += kPieceMax) {
    const int64_t count = std::min(kPieceMax, elements - first);
    std::mutex mutex;
    absl::Status failed;
    stream_.team().Run(count, kGrain, [&](int64_t begin, int64_t end) {
      const Slice slice{.parameter = p,
                        .name = spec.name,
                        .shape = spec.shape,
                        .begin = first + begin,
                        .end = first + end};
      absl::Status status =
          spec.init(slice, {shared_.staging + begin, static_cast<size_t>(end - begin)});
      const std::lock_guard lock(mutex);
      failed.Update(status);
    });
    EBB_RETURN_IF_ERROR(failed);
    stream_.Copy(Floats(masters_, 1, OffsetOf(p) + first), shared_.staging,
                 count * int64_t{sizeof(float)});
    stream_.WaitIdle();
  }
  return device_.status();
}

int64_t BareTrainer::OffsetOf(ParameterId p) const {
  const sharding::ParameterLocation& location = layout_.parameters[static_cast<int>(p)];
  return unit_offsets_[location.unit] + location.offset;
}

const void* BareTrainer::Parameter(ParameterId p) const {
  if (options_.compute == DType::kFloat32) return Floats(masters_, 1, OffsetOf(p));
  return parameters_.data() + OffsetOf(p) * SizeOf(options_.compute);
}

// The head's visit to the tied unit has a gradient of its own, because each visit is reduced alone.
gpt::Target BareTrainer::Gradient(ParameterId p, bool head) {
  const sharding::ParameterLocation& location = layout_.parameters[static_cast<int>(p)];
  const int64_t offset = head ? elements_ + location.offset : OffsetOf(p);
  const size_t index = static_cast<size_t>(p) + (head ? model_.parameters.size() : 0);
  const bool first = !written_[index];
  written_[index] = true;
  return {gradients_.data() + kSkew + offset * SizeOf(options_.compute), options_.compute,
          first ? 0.0f : 1.0f};
}

absl::Status BareTrainer::LoadBatch(int64_t step) {
  const gpt::Batches::HostArrays host = batches_->Fill(0);
  const size_t length = static_cast<size_t>(options_.shape.context);
  for (int64_t s = 0; s < options_.sequences; ++s) {
    const size_t at = static_cast<size_t>(s) * length;
    EBB_RETURN_IF_ERROR(
        text_.Training(options_.seed, static_cast<uint64_t>(step * options_.sequences + s),
                       host.tokens.subspan(at, length), host.targets.subspan(at, length)));
  }
  batches_->Load(0, options_.sequences, options_.shape.context);
  return absl::OkStatus();
}

absl::Status BareTrainer::Step(int64_t step) {
  EBB_RETURN_IF_ERROR(Pass(step));
  SumSquares();
  Update();
  stream_.WaitIdle();
  EBB_RETURN_IF_ERROR(layers_->status());
  return device_.status();
}

absl::Status BareTrainer::Pass(int64_t step, std::span<sharding::KernelWork> seconds) {
  const int64_t blocks = options_.shape.layers;
  const auto input = [&](int64_t block) { return boundaries_.data() + boundary_bytes_ * block; };
  const auto flow = [&](int64_t block) {
    return boundary_gradients_.data() + boundary_bytes_ * (block % 2);
  };
  const auto parameters = [&](ParameterId p) { return Parameter(p); };
  const auto gradients = [&](ParameterId p) { return Gradient(p, /*head=*/false); };
  const auto head_gradients = [&](ParameterId p) { return Gradient(p, /*head=*/true); };
  auto since = std::chrono::steady_clock::now();
  const auto took = [&](int64_t visit, double sharding::KernelWork::*pass) {
    const auto now = std::chrono::steady_clock::now();
    if (!seconds.empty())
      seconds[visit].*pass += std::chrono::duration<double>(now - since).count();
    since = now;
  };

  std::fill(written_.begin(), written_.end(), false);
  EBB_RETURN_IF_ERROR(LoadBatch(step));
  const gpt::Batch& batch = batches_->batch(0);
  layers_->Embed(parameters, batch, input(0));
  took(0, &sharding::KernelWork::forward);
  for (int64_t b = 0; b < blocks; ++b) {
    layers_->BlockForward(parameters, b, batch, input(b), b, input(b + 1));
    took(b + 1, &sharding::KernelWork::forward);
  }
  layers_->HeadBackward(parameters, head_gradients, batch, input(blocks), shared_.loss_scale,
                        flow(blocks));
  took(blocks + 1, &sharding::KernelWork::backward);
  for (int64_t b = blocks; b-- > 0;) {
    layers_->BlockBackward(parameters, gradients, b, batch, input(b), b, flow(b + 1), flow(b));
    took(b + 1, &sharding::KernelWork::backward);
  }
  layers_->EmbedBackward(gradients, batch, flow(0));
  took(0, &sharding::KernelWork::backward);
  return layers_->status();
}

void BareTrainer::SumSquares() {
  // Bytes that kernels have not written are zero.
  const int64_t size = SizeOf(options_.compute);
  for (size_t index = 0; index < written_.size(); ++index) {
    const bool head = index >= model_.parameters.size();
    const ParameterId p{static_cast<int32_t>(index % model_.parameters.size())};
    const sharding::ParameterLocation& location = layout_.parameters[static_cast<int>(p)];
    if (written_[index] || (head && location.unit != static_cast<int>(gpt_.embedding))) continue;
    stream_.Zero(Gradient(p, head).data, location.elements * size);
  }
  std::byte* const gradients = gradients_.data() + kSkew;
  float* const summed = Floats(summed_, 2, 0);
  const std::span blocks(reinterpret_cast<double*>(norm_blocks_.data()),
                         static_cast<size_t>(optim::NormBlocks(elements_)));
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int64_t count = layout_.units[u].elements();
    const std::byte* const own = gradients + unit_offsets_[u] * size;
    if (u == static_cast<size_t>(gpt_.embedding)) {
      kernels_->Accumulate(stream_, {.source = gradients + elements_ * size,
                                     .source_dtype = options_.compute,
                                     .destination = summed,
                                     .destination_dtype = DType::kFloat32,
                                     .count = count,
                                     .add = false});
      kernels_->AccumulateAndSumSquares(stream_,
                                        {.source = own,
                                         .source_dtype = options_.compute,
                                         .destination = summed,
                                         .destination_dtype = DType::kFloat32,
                                         .count = count,
                                         .add = true},
                                        blocks, &shared_.squares[u]);
    } else {
      kernels_->SumOfSquares(stream_, own, options_.compute, count, blocks, &shared_.squares[u]);
    }
  }
}

void BareTrainer::Update() {
  ++updates_;
  stream_.Enqueue([this, step = updates_] {
    double squares = 0;
    for (const double square : shared_.squares) squares += square;
    double factor = 1;
    if (options_.gradient_clipping > 0)
      factor /= std::max(1.0, (std::sqrt(squares) + 1e-6) / options_.gradient_clipping);
    *shared_.constants = optim::UpdateConstantsOf(
        options_.optimizer, {.step = step,
                             .learning_rate = options_.optimizer.learning_rate,
                             .gradient_factor = static_cast<float>(factor)});
  });
  stream_.Copy(constants_.data(), shared_.constants, sizeof(optim::UpdateConstants));
  const int64_t size = SizeOf(options_.compute);
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int64_t offset = unit_offsets_[u];
    const bool tied = u == static_cast<size_t>(gpt_.embedding);
    optim::UpdateArrays arrays{
        .master = Floats(masters_, 1, offset),
        .gradient = tied ? summed_.data() + 2 * kSkew : gradients_.data() + kSkew + offset * size,
        .gradient_dtype = tied ? DType::kFloat32 : options_.compute,
        .parameter =
            options_.compute == DType::kFloat32 ? nullptr : parameters_.data() + offset * size,
        .parameter_dtype = options_.compute,
        .count = layout_.units[u].elements()};
    arrays.states[0].codes = Floats(momentum_, 3, offset);
    arrays.states[1].codes = Floats(variance_, 4, offset);
    kernels_->Update(stream_, options_.optimizer, arrays,
                     reinterpret_cast<const optim::UpdateConstants*>(constants_.data()));
  }
}

absl::StatusOr<std::span<const float>> BareTrainer::Masters(const Slice& slice) {
  const int64_t count = slice.end - slice.begin;
  if (count > kPieceMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("elements ", slice.begin, " to ", slice.end, " of ",
                     absl::string_view(slice.name.data(), slice.name.size()), " are more than ",
                     kPieceMax, ": ask for fewer at once"));
  }
  stream_.Copy(shared_.staging, Floats(masters_, 1, OffsetOf(slice.parameter) + slice.begin),
               count * int64_t{sizeof(float)});
  stream_.WaitIdle();
  EBB_RETURN_IF_ERROR(device_.status());
  return std::span<const float>(shared_.staging, static_cast<size_t>(count));
}

int64_t BareTrainer::elements() const {
  int64_t elements = 0;
  for (const ParameterSpec& parameter : model_.parameters) elements += Elements(parameter.shape);
  return elements;
}

}  // namespace ebb::bench
