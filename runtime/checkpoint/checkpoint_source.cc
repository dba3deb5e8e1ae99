#include "ebb/runtime/checkpoint/checkpoint_source.h"

#include <utility>

#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/checkpoint/stored_values.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

class CheckpointSource : public TensorSource {
 public:
  CheckpointSource(std::string path, const Manifest& manifest, StoredValues values)
      : values_(std::move(values)) {
    description_ = {.kind = "checkpoint of Ebb",
                    .path = std::move(path),
                    .state = manifest.state,
                    .model_config = ""};
    const auto config = manifest.trainer.find(kModelConfigName);
    if (config != manifest.trainer.end()) description_.model_config = config->second;
    for (const Manifest::Parameter& parameter : manifest.parameters) {
      tensors_.push_back({.name = parameter.name,
                          .dtype = parameter.dtype,
                          .shape = parameter.shape,
                          .trainable = parameter.trainable});
    }
    for (const Manifest::Parameter& parameter : manifest.parameters)
      for (const std::string& state : parameter.states)
        tensors_.push_back({.name = parameter.name, .state = state, .shape = parameter.shape});
  }

  absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) override {
    const TensorInfo& info = tensors_[tensor];
    const std::string_view value = info.trainable ? kMasterClass : kParameterClass;
    return values_.Read(info.state.empty() ? std::string(value) : info.state, info.name, begin,
                        values);
  }

 private:
  StoredValues values_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> OpenCheckpointSource(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(std::string found, FindCheckpoint(path));
  EBB_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(found));
  return OpenWholeCheckpoint(std::move(found), std::move(manifest));
}

absl::StatusOr<std::unique_ptr<TensorSource>> OpenWholeCheckpoint(std::string checkpoint,
                                                                  Manifest manifest) {
  StoredValues values(checkpoint, manifest);
  EBB_RETURN_IF_ERROR(values.ReadAllHeaders());
  return std::make_unique<CheckpointSource>(std::move(checkpoint), manifest, std::move(values));
}

}  // namespace ebb
