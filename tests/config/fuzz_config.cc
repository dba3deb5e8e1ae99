#include "fuzz_config.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/convert.h"

namespace {

constexpr size_t kMessageBytesMax = 16384;
constexpr ebb::TrainerValues kTrainer = {.micro_batch_size = 2,
                                         .gradient_accumulation_steps = 1,
                                         .total_steps = 100,
                                         .warmup_steps = 10,
                                         .learning_rate = 1e-3,
                                         .beta1 = 0.9,
                                         .beta2 = 0.95,
                                         .epsilon = 1e-8,
                                         .weight_decay = 0.1,
                                         .gradient_clipping = 1.0,
                                         .compute = ebb::DType::kBFloat16};

void Require(bool holds, std::string_view law, std::string_view text) {
  if (holds) return;
  std::fprintf(stderr, "%.*s does not hold for:\n%.*s\n", static_cast<int>(law.size()), law.data(),
               static_cast<int>(text.size()), text.data());
  std::abort();
}

void CheckOne(std::string_view text, const ebb::ReadOptions& options) {
  const absl::StatusOr<ebb::Config> config = ebb::Config::FromJson(text, options);
  if (!config.ok()) {
    const std::string_view message(config.status().message().data(),
                                   config.status().message().size());
    Require(config.status().code() == absl::StatusCode::kInvalidArgument, "the code", text);
    Require(!message.empty() && message.size() < kMessageBytesMax, "the message's length", text);
    Require(ebb::config::IsUtf8(message), "the message's UTF-8", text);
    return;
  }
  Require(config->Validate().ok(), "validity", text);
  const std::string json = config->ToJson();
  const absl::StatusOr<ebb::Config> again = ebb::Config::FromJson(json);
  Require(again.ok() && again->ToJson() == json, "the round trip", text);
  Require(ebb::config::Explain(text, options).ok(), "the explanation", text);
  for (const int world : {1, 7}) (void)config->ForWorld(world);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  CheckOne(text, {});
  CheckOne(text, {.trainer = kTrainer, .unknown_keys = ebb::UnknownKeys::kWarn});
  return 0;
}
