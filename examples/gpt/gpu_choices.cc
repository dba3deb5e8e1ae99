// The functions of trainer.h that choose, before the first step on a GPU, how products are computed
// and whether passes are launched as CUDA graphs.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "agreement.h"
#include "ebb/runtime/trace/log.h"
#include "model/trial_passes.h"
#include "status_macros.h"
#include "trainer.h"

namespace ebb::gpt {
namespace {

// Graphs take memory of the host and of the device beside the engine's pools, so their number is
// limited. Further passes are launched kernel by kernel.
constexpr int64_t kGraphsMax = 1024;

}  // namespace

absl::Status Trainer::SettleProducts() {
  const double timeout = engine_->config().ebb.timeout_seconds;
  // After it no rank's enqueued work needs anything more of another rank.
  const auto meet = [&](const char* name) {
    return world_.MeetOnHost({.name = name, .timeout_seconds = timeout});
  };
  GPT_RETURN_IF_ERROR(meet("engines made"));
  const bool measures = options_.products == kMeasuredProducts;
  const bool given = !measures && options_.products != kDefaultProducts;
  const auto pass = [&](const ProductChoice& choice) -> absl::StatusOr<std::string> {
    absl::StatusOr<std::string> letters =
        WarmUp(device_, work_.gpt, work_.layers, engine_->program().gradient(), choice, *layers_);
    if (letters.ok() || !absl::IsResourceExhausted(letters.status())) return letters;
    // Another rank may compute by these letters, so a rank that cannot try them may not compute
    // otherwise.
    if (!choice.letters.empty()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("trying products before the first step: ", letters.status().message(),
                       "; --products default computes them without a trial"));
    }
    LogWarning(
        absl::StrCat("kernels are loaded in the first step, and products computed in the "
                     "default way: ",
                     letters.status().message()));
    return "";
  };
  std::string letters = given ? options_.products : "";
  if (measures) {
    if (world_.rank() == 0) {
      GPT_ASSIGN_OR_RETURN(letters, pass({.measures = true, .letters = ""}));
    }
    GPT_ASSIGN_OR_RETURN(letters, TextOfFirst(world_, letters, timeout));
  }
  if (!measures || world_.rank() != 0) {
    GPT_ASSIGN_OR_RETURN(const std::string used, pass({.measures = false, .letters = letters}));
    if (given && !used.empty() && used.size() != letters.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--products ", letters, " has ", letters.size(), " letters, and this model has ",
          used.size(), " products here: give what a run of the same model has printed"));
    }
    if (used.empty()) letters.clear();
  }
  products_ = letters.empty() ? "products by default"
              : given         ? "products as given"
                      : absl::StrCat("products as measured (--products ", letters, " repeats it)");
  product_letters_ = std::move(letters);
  // The pass's memory has been freed.
  return meet("products settled");
}

absl::StatusOr<std::string> Trainer::ChooseCudaGraphs() {
  if (device_.kind() != DeviceKind::kCuda) return "";
  if (work_.layers.tensor.cuts()) return "CUDA graphs off (layers are cut over tensor ranks)";
  bool on = options_.cuda_graphs == CudaGraphs::kOn;
  std::string why;
  if (options_.cuda_graphs == CudaGraphs::kAuto) {
    const auto times =
        MeasureLaunches(device_, work_.gpt, work_.layers, engine_->program().gradient(), *layers_);
    GPT_RETURN_IF_ERROR(layers_->status());
    GPT_RETURN_IF_ERROR(device_.status());
    // The measurement's memory has been freed.
    GPT_RETURN_IF_ERROR(world_.MeetOnHost(
        {.name = "launches measured", .timeout_seconds = engine_->config().ebb.timeout_seconds}));
    on = times.ok() && times->GraphsPay();
    why = absl::StrCat(" (", times.ok() ? times->Text() : times.status().message(), ")");
  }
  if (on) layers_->KeepGraphs(std::min(work_.passes, kGraphsMax));
  return absl::StrCat("CUDA graphs ", on ? "on" : "off", why);
}

}  // namespace ebb::gpt
