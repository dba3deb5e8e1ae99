#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/program/program.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {
namespace {

std::string Size(int64_t bytes) {
  return bytes < 1 << 20 ? absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / 1024)
                         : absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

// Prints the files of a checkpoint, and nothing for other sources.
absl::Status PrintFiles(const std::string& path) {
  if (!HasManifest(path)) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(path));
  const TrainingState& state = manifest.state;
  absl::PrintF("step %d: %d applied, %d skipped\n", state.finished_steps, state.applied_steps,
               state.skipped_steps);
  if (!manifest.trainer.empty()) {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : manifest.trainer) names.push_back(config::Shortened(name));
    absl::PrintF("trainer's values: %s\n", absl::StrJoin(names, ", "));
  }
  for (const auto& [name, encoding] : manifest.state_encodings)
    absl::PrintF("%s: 8 bits (%s), fp32 of small parameters\n", config::Shortened(name), encoding);
  int blocks = 1, cut = 0;
  for (const Manifest::Parameter& parameter : manifest.parameters) {
    blocks = std::max(blocks, parameter.blocks);
    cut += parameter.blocks > 1;
  }
  if (cut > 0) absl::PrintF("%d parameters in blocks of %d tensor ranks\n", cut, blocks);
  const int ranks = static_cast<int>(manifest.files.size());
  for (int rank = 0; rank < ranks; ++rank)
    absl::PrintF("rank %d: %s, %s\n", rank, RankFileName(rank, ranks),
                 Size(manifest.files[rank].bytes));
  return absl::OkStatus();
}

// Other commands take an older checkpoint if the newest of a folder is damaged. This one reports
// the damage.
absl::Status CheckNewest(const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> candidates = CandidatesIn(path);
  if (!candidates.ok()) return absl::OkStatus();  // not a folder of checkpoints
  const std::string& newest = candidates->front();
  return WithWayOut(CheckWhole(newest).status(), newest);
}

}  // namespace

absl::StatusOr<int> Inspect(const InspectOptions& options) {
  EBB_RETURN_IF_ERROR(CheckNewest(options.path));
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, OpenAnySource(options.path));
  const SourceDescription& about = source->description();
  absl::PrintF("%s: %s\n", about.path, about.kind);
  EBB_RETURN_IF_ERROR(PrintFiles(about.path));
  std::map<std::string, std::vector<std::string>> states;
  int64_t elements = 0, parameters = 0, all = 0, bytes = 0;
  for (const TensorInfo& tensor : source->tensors()) {
    all += tensor.elements();
    bytes += tensor.elements() * SizeOf(tensor.dtype);
    if (!tensor.state.empty()) {
      states[tensor.name].push_back(tensor.state);
      continue;
    }
    elements += tensor.elements();
    ++parameters;
  }
  for (const TensorInfo& tensor : source->tensors()) {
    if (!tensor.state.empty()) continue;
    const auto kept = states.find(tensor.name);
    absl::PrintF(
        "  %-40s %-16s %s%s%s\n", config::Shortened(tensor.name), ShapeText(tensor.shape),
        std::string(Name(tensor.dtype)), tensor.trainable ? "" : " frozen",
        kept == states.end() ? "" : absl::StrCat(" + ", absl::StrJoin(kept->second, ", ")));
  }
  for (const LeftOutTensor& tensor : about.left_out)
    absl::PrintF("  %s is %s\n", config::Shortened(tensor.name), tensor.why);
  absl::PrintF("%d parameters, %d elements, %s with their states\n", parameters, elements,
               Size(bytes));
  if (!options.verify) return kDone;
  const bool is_checkpoint = about.kind.starts_with("checkpoint");
  {
    ProgressBar bar("reading", all);
    const absl::Status read = ForEachPiece(*source, [&](size_t, std::span<const float> values) {
      bar.Add(static_cast<int64_t>(values.size()));
      return absl::OkStatus();
    });
    EBB_RETURN_IF_ERROR(is_checkpoint ? WithWayOut(read, about.path) : read);
  }
  absl::PrintF("all values were read%s\n",
               is_checkpoint ? ", and have the checksums that were saved" : "");
  return kDone;
}

}  // namespace ebb
