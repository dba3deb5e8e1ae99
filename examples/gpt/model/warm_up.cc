#include "model/warm_up.h"

#include "model/pass_buffers.h"
#include "status_macros.h"

namespace ebb::gpt {

absl::StatusOr<std::string> WarmUp(const Device& device, const Gpt& gpt,
                                   const Layers::Options& options, DType gradient,
                                   const ProductChoice& choice, Layers& layers) {
  GPT_ASSIGN_OR_RETURN(
      const Buffer memory,
      device.Allocate(PassBuffers(gpt.shape, options, gradient, nullptr).bytes, "a first pass"));
  const PassBuffers buffers(gpt.shape, options, gradient, memory.data());
  Stream stream =
      device.CallerStream();  // destroyed first: its work has ended before the memory is freed
  const Batch batch = {.tokens = buffers.tokens,
                       .targets = buffers.targets,
                       .sequences = options.sequences,
                       .length = gpt.shape.context};
  const auto parameter = [&](ParameterId) -> const void* { return buffers.parameters; };
  layers.ChooseProducts(choice);
  layers.Embed(parameter, batch, buffers.input);
  layers.BlockForward(parameter, 0, batch, buffers.input, 0, buffers.output);
  layers.HeadLoss(parameter, batch, buffers.output);
  for (const float beta : {0.0f, 1.0f}) {
    const auto target = [&](ParameterId) { return Target{buffers.parameters, gradient, beta}; };
    layers.HeadBackward(parameter, target, batch, buffers.output, /*loss_scale=*/nullptr,
                        buffers.output_gradient);
    layers.BlockBackward(parameter, target, 0, batch, buffers.input, 0, buffers.output_gradient,
                         buffers.input_gradient);
    layers.EmbedBackward(target, batch, buffers.input_gradient);
  }
  layers.LastLogits(parameter, batch, buffers.output);
  stream.WaitIdle();
  std::string letters = layers.product_letters();
  layers.ChooseProducts({});
  GPT_RETURN_IF_ERROR(layers.status());
  GPT_RETURN_IF_ERROR(device.status());
  return letters;
}

}  // namespace ebb::gpt
