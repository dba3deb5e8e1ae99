// The functions of trainer.h that only run forward: the loss on held-out text, and generating text
// byte by byte.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "status_macros.h"
#include "trainer.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kHeldOutBatches = 4;  // for each rank, at most
constexpr float kTemperature = 0.8f;
constexpr size_t kChoices = 40;  // the likeliest bytes, one of which is drawn

// Draws among the likeliest bytes with probability proportional to exp(logit / temperature).
char Draw(std::span<const float> logits, std::mt19937_64& random) {
  std::array<std::pair<float, int>, 256> bytes;
  for (int i = 0; i < 256; ++i) {
    const float logit = logits[i];
    bytes[i] = {std::isnan(logit) ? std::numeric_limits<float>::lowest() : logit, i};
  }
  std::partial_sort(bytes.begin(), bytes.begin() + kChoices, bytes.end(), std::greater<>());
  std::array<double, kChoices> weights;
  double total = 0;
  for (size_t i = 0; i < kChoices; ++i)
    total += weights[i] = std::exp((bytes[i].first - bytes[0].first) / kTemperature);
  double left = total * static_cast<double>(random() >> 11) * 0x1p-53;
  size_t choice = 0;
  while (choice + 1 < kChoices && left >= weights[choice]) left -= weights[choice++];
  return static_cast<char>(bytes[choice].second);
}

// The error of a vote that failed: the engine knows in which unit.
absl::Status LostIn(Evaluation& evaluation, absl::Status voted) {
  absl::Status walked = evaluation.Finish().status();
  return walked.ok() ? voted : walked;
}

}  // namespace

ForwardScope Trainer::WalkToHead(Evaluation& evaluation, const Batch& batch) {
  {
    ForwardScope unit = evaluation.Forward(work_.gpt.embedding);
    layers_->Embed(ScopeParameters{unit}, batch, unit.output(0).data);
  }
  for (int64_t b = 0; b < options_.shape.layers; ++b) {
    ForwardScope unit = evaluation.Forward(work_.gpt.blocks[b].unit);
    layers_->BlockForward(ScopeParameters{unit}, b, batch, unit.input(0).data, /*slot=*/0,
                          unit.output(0).data);
  }
  return evaluation.Forward(work_.gpt.embedding);
}

absl::StatusOr<std::optional<double>> Trainer::Evaluate(StopVote& vote) {
  const size_t length = static_cast<size_t>(options_.shape.context);
  const int64_t per_walk = engine_->data_ranks() * work_.sequences;
  const int64_t walks = std::clamp<int64_t>(
      text_.held_out_bytes() / options_.shape.context / per_walk, 1, kHeldOutBatches);
  Evaluation evaluation = engine_->BeginEvaluation();
  for (int64_t walk = 0; walk < walks; ++walk) {
    if (absl::Status voted = vote.Decide(); !voted.ok()) return LostIn(evaluation, voted);
    if (vote.stopped()) return std::nullopt;
    const Batches::HostArrays host = batches_->Fill(0);
    for (int64_t s = 0; s < work_.sequences; ++s) {
      const size_t at = static_cast<size_t>(s) * length;
      text_status_.Update(text_.HeldOut(
          (walk * engine_->data_ranks() + engine_->data_rank()) * work_.sequences + s,
          walks * per_walk, host.tokens.subspan(at, length), host.targets.subspan(at, length)));
    }
    const Batch batch = batches_->Load(0, work_.sequences, options_.shape.context);
    ForwardScope head = WalkToHead(evaluation, batch);
    evaluation.AddLoss(Scalar(layers_->HeadLoss(ScopeParameters{head}, batch, head.input(0).data)));
  }
  GPT_RETURN_IF_ERROR(status());
  return evaluation.Finish();
}

absl::StatusOr<std::string> Trainer::Sample(const std::string& prompt, int64_t bytes,
                                            StopVote& vote) {
  const int64_t context = options_.shape.context;
  std::string text = prompt.empty() ? "\n" : prompt;
  std::mt19937_64 random(options_.seed);
  // Not traced: a walk for each byte would fill the timeline.
  Evaluation evaluation = engine_->BeginEvaluation(/*micro_batches=*/1, {.traced = false});
  for (int64_t i = 0; i < bytes; ++i) {
    if (absl::Status voted = vote.Decide(); !voted.ok()) return LostIn(evaluation, voted);
    if (vote.stopped()) break;
    const size_t seen = std::min(text.size(), static_cast<size_t>(context));
    const Batches::HostArrays host = batches_->Fill(0);
    for (size_t t = 0; t < seen; ++t)
      host.tokens[t] = host.targets[t] = static_cast<uint8_t>(text[text.size() - seen + t]);
    // Tensor ranks divide the rows. Those behind the text change none before them.
    const int64_t parts = work_.layers.tensor.row_parts(), rows = static_cast<int64_t>(seen),
                  padding = (parts - rows % parts) % parts;
    std::fill_n(host.tokens.begin() + rows, padding, 0);
    std::fill_n(host.targets.begin() + rows, padding, 0);
    const Batch batch = batches_->Load(0, /*sequences=*/1, rows + padding);
    ForwardScope head = WalkToHead(evaluation, batch);
    text.push_back(Draw(
        layers_->LastLogits(ScopeParameters{head}, batch, head.input(0).data, padding), random));
  }
  GPT_RETURN_IF_ERROR(status());
  GPT_RETURN_IF_ERROR(evaluation.Finish().status());
  return text;
}

}  // namespace ebb::gpt
