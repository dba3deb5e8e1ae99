#include "ebb/runtime/config/config.h"

#include <cerrno>
#include <cstdio>
#include <memory>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/document.h"

namespace ebb {
namespace {

absl::Status Unreadable(const std::string& path, int error) {
  return absl::ErrnoToStatus(error, config::Join({"cannot read the configuration ", path}));
}

absl::Status OfFile(const std::string& path, const absl::Status& status) {
  return config::Invalid({path, ": ", {status.message().data(), status.message().size()}});
}

// Reads any file, also a pipe, but stops soon after the most bytes that a configuration can have.
absl::StatusOr<std::string> ReadText(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) return Unreadable(path, errno);
  std::string text(config::kDocumentBytesMax + 1, '\0');
  errno = 0;
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0) return Unreadable(path, errno);
  return text;
}

}  // namespace

absl::StatusOr<Config> Config::FromFile(const std::string& path, const ReadOptions& options) {
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  absl::StatusOr<Config> config = FromJson(text, options);
  if (!config.ok()) return OfFile(path, config.status());
  return config;
}

absl::StatusOr<Config> Config::FromJson(std::string_view json, const ReadOptions& options) {
  EBB_ASSIGN_OR_RETURN(config::Document document, config::ParseDocument(json));
  return config::FromDocument(std::move(document), options);
}

absl::StatusOr<std::string> Config::ExplainFile(const std::string& path,
                                                const ReadOptions& options) {
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  absl::StatusOr<std::string> explained = config::Explain(text, options);
  if (!explained.ok()) return OfFile(path, explained.status());
  return config::Join({path, "\n", *explained});
}

// Checks each key's range by the table, as for a file, because a Config can be wrong only in the
// ways in which a file can.
absl::Status Config::Validate() const {
  config::Problems problems;
  config::CheckTogether(*this, problems);
  EBB_RETURN_IF_ERROR(config::FromDocument({config::ToDocument(*this), {}}).status());
  return problems.status();
}

std::string Config::ToJson() const {
  return config::ToDocument(*this).dump(2, ' ', false, config::Json::error_handler_t::replace);
}

bool Config::checks_overflow() const {
  switch (compute) {
    case DType::kFloat16:
      return true;
    case DType::kBFloat16:
      return bf16_check_grad_overflow && ebb.check_overflow;
    default:
      return ebb.check_overflow;
  }
}

bool Config::reduces_at_round() const {
  if (ebb.reduce_at == ReduceAt::kDefault) return zero.stage >= 2;
  return ebb.reduce_at == ReduceAt::kRound;
}

Tier Config::parameter_tier() const {
  return zero.stage == 3 ? zero.offload_param.device : Tier::kDevice;
}

Tier Config::optimizer_tier() const {
  return zero.stage >= 1 ? zero.offload_optimizer.device : Tier::kDevice;
}

Tier Config::gradient_tier() const {
  return ebb.offload_gradients.value_or(optimizer_tier() == Tier::kDevice ? Tier::kDevice
                                                                          : Tier::kCpu);
}

Tier Config::activation_tier() const {
  return ebb.offload_activations.value_or(
      activation_checkpointing.cpu_checkpointing ? Tier::kCpu : Tier::kDevice);
}

bool Config::uses_nvme() const {
  return parameter_tier() == Tier::kNvme || optimizer_tier() == Tier::kNvme ||
         gradient_tier() == Tier::kNvme || activation_tier() == Tier::kNvme;
}

}  // namespace ebb
