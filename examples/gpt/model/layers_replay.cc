// The blocks' passes of layers.h, in a form that Ops::Replay can launch as a CUDA graph: within a
// scope of the engine a pass consists only of launches. Views are taken before the pass, and the
// engine's own work comes before and after it.
#include <array>
#include <cstddef>

#include "model/layers.h"

namespace ebb::gpt {

// All that a pass depends on. Parameters and gradients are looked up here, once each, because a
// second request would give a gradient another beta.
class Layers::BlockPass {
 public:
  BlockPass(const BlockIds& block, const Batch& batch, const void* input, int64_t slot)
      : ids_{block.norm1_weight,      block.norm1_bias,      block.qkv_weight,   block.qkv_bias,
             block.projection_weight, block.projection_bias, block.norm2_weight, block.norm2_bias,
             block.up_weight,         block.up_bias,         block.down_weight,  block.down_bias} {
    Add(batch.sequences);
    Add(batch.length);
    Add(slot);
    Add(input);
  }

  void Add(int64_t number) { key_[words_++] = static_cast<uint64_t>(number); }
  void Add(const void* address) { key_[words_++] = reinterpret_cast<uintptr_t>(address); }
  void LookUp(Parameters parameters) {
    for (size_t i = 0; i < kCount; ++i) Add(parameters_[i] = parameters(ids_[i]));
  }
  void LookUp(Gradients gradients) {
    for (size_t i = 0; i < kCount; ++i) {
      const Target& target = gradients_[i] = gradients(ids_[i]);
      Add(target.data);
      Add(int64_t{static_cast<int>(target.dtype)} * 2 + (target.beta != 0));
    }
  }

  const void* parameter(ParameterId id) const { return parameters_[IndexOf(id)]; }
  Target gradient(ParameterId id) const { return gradients_[IndexOf(id)]; }
  std::span<const uint64_t> key() const { return std::span(key_).first(words_); }

 private:
  static constexpr size_t kCount = 12;

  size_t IndexOf(ParameterId id) const {
    size_t i = 0;
    while (ids_[i] != id) ++i;  // a pass asks only for parameters of its block
    return i;
  }

  const std::array<ParameterId, kCount> ids_;
  std::array<const void*, kCount> parameters_ = {};
  std::array<Target, kCount> gradients_ = {};
  std::array<uint64_t, 6 + 3 * kCount> key_ = {};
  size_t words_ = 0;
};

void Layers::BlockForward(Parameters parameters, int64_t block, const Batch& batch,
                          const void* input, int64_t slot, void* output) {
  if (!Replays(batch)) return EnqueueForward(parameters, block, batch, input, slot, output);
  BlockPass pass(gpt_.blocks[block], batch, input, slot);
  pass.Add(output);
  pass.LookUp(parameters);
  const auto parameter = [&](ParameterId id) { return pass.parameter(id); };
  ops_->Replay(pass.key(), [&] { EnqueueForward(parameter, block, batch, input, slot, output); });
}

void Layers::BlockBackward(Parameters parameters, Gradients gradients, int64_t block,
                           const Batch& batch, const void* input, int64_t slot,
                           const void* output_gradient, void* input_gradient) {
  if (!Replays(batch)) {
    return EnqueueBackward(parameters, gradients, block, batch, input, slot, output_gradient,
                           input_gradient);
  }
  BlockPass pass(gpt_.blocks[block], batch, input, slot);
  pass.Add(output_gradient);
  pass.Add(input_gradient);
  pass.LookUp(parameters);
  pass.LookUp(gradients);
  const auto parameter = [&](ParameterId id) { return pass.parameter(id); };
  const auto gradient = [&](ParameterId id) { return pass.gradient(id); };
  ops_->Replay(pass.key(), [&] {
    EnqueueBackward(parameter, gradient, block, batch, input, slot, output_gradient,
                    input_gradient);
  });
}

}  // namespace ebb::gpt
