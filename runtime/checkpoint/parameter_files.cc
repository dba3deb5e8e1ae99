#include "ebb/runtime/checkpoint/parameter_files.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/parameter_names.h"
#include "ebb/runtime/checkpoint/safetensors_writer.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/checkpoint/whole_checkpoint.h"

namespace ebb {
namespace {

bool HasName(const TensorSource& source, const std::string& name) {
  return std::any_of(source.tensors().begin(), source.tensors().end(),
                     [&](const TensorInfo& tensor) { return tensor.name == name; });
}

absl::StatusOr<std::unique_ptr<TensorSource>> NamedFor(const ModelSpec& model,
                                                       std::unique_ptr<TensorSource> source,
                                                       ParameterNames names) {
  if (names == ParameterNames::kAuto && !model.parameters.empty() &&
      HasName(*source, model.parameters[0].name))
    names = ParameterNames::kSame;
  return NamedInside(std::move(source), names);
}

// For each parameter, the index of the tensor with its value.
absl::StatusOr<std::vector<size_t>> Fit(const ModelSpec& model, const TensorSource& source) {
  std::map<std::string, size_t> there;
  for (size_t i = 0; i < source.tensors().size(); ++i)
    if (source.tensors()[i].state.empty()) there[source.tensors()[i].name] = i;
  std::vector<std::string> differences;
  std::vector<size_t> tensor_of;
  for (const ParameterSpec& parameter : model.parameters) {
    const auto found = there.find(parameter.name);
    if (found == there.end()) {
      differences.push_back(absl::StrCat("it lacks '", parameter.name, "'"));
      continue;
    }
    const TensorInfo& tensor = source.tensors()[found->second];
    if (std::string why = Misfit(parameter, tensor.shape, tensor.dtype); !why.empty())
      differences.push_back(std::move(why));
    tensor_of.push_back(found->second);
    there.erase(found);
  }
  for (const auto& [name, tensor] : there) {
    if (source.tensors()[tensor].dtype == DType::kInt8) continue;  // a buffer, perhaps
    differences.push_back(absl::StrCat("it has '", name, "', which the model lacks"));
  }
  if (differences.empty()) return tensor_of;
  return absl::FailedPreconditionError(absl::StrCat(
      "'", source.description().path, "' does not fit the model: ", DifferencesText(differences)));
}

// Sets the parameters. `opened`: this rank's.
absl::Status ImportFrom(Engine& engine, absl::StatusOr<std::unique_ptr<TensorSource>> opened,
                        const ImportOptions& options, ReadAttempt& attempt) {
  ReadErrors own = {.engine = absl::OkStatus(), .files = opened.status()};
  std::unique_ptr<TensorSource> source;
  std::vector<size_t> tensor_of;
  const auto fit = [&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(source, NamedFor(engine.model(), *std::move(opened), options.names));
    EBB_ASSIGN_OR_RETURN(tensor_of, Fit(engine.model(), *source));
    return options.check ? options.check(source->description().model_config) : absl::OkStatus();
  };
  if (own.files.ok()) own.engine = fit();
  if (absl::IsDataLoss(own.engine)) std::swap(own.engine, own.files);  // the names are by values
  EBB_RETURN_IF_ERROR(AgreeOnRead(engine, own, attempt));
  attempt.has_written = true;
  // After an error no more values are read, but each rank makes the same collective calls.
  const auto give = [&](const Slice& slice, std::span<float> values) -> absl::Status {
    if (own.files.ok())
      own.files = source->Read(tensor_of[static_cast<int>(slice.parameter)], slice.begin, values);
    return own.files;
  };
  const absl::Status written = engine.Write(StateClass::kMaster, give);
  if (own.files.ok()) own.engine = written;
  return AgreeOnRead(engine, own, attempt);
}

// Rank 0's part. Other ranks take part in the collective calls of `engine`.
absl::Status WriteValues(Engine& engine, const std::vector<bool>& transposed,
                         SafetensorsWriter* writer) {
  const ModelSpec& model = engine.model();
  std::vector<float> rows, columns;
  absl::Status first;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    rows.clear();
    // Returns OK after an error, so that the collective calls go on as on other ranks.
    const auto take = [&](const Slice&, std::span<const float> values) -> absl::Status {
      if (writer == nullptr || !first.ok()) return absl::OkStatus();
      if (transposed[p]) {
        rows.insert(rows.end(), values.begin(), values.end());
      } else {
        first = writer->Append(values);
      }
      return absl::OkStatus();
    };
    EBB_RETURN_IF_ERROR(
        engine.Gather(static_cast<ParameterId>(p), StateClass::kMaster, take, /*root=*/0));
    if (writer == nullptr || !first.ok() || !transposed[p]) continue;
    const size_t height = static_cast<size_t>(WholeShape(model.parameters[p])[0]),
                 width = rows.size() / height;
    columns.resize(rows.size());
    for (size_t row = 0; row < height; ++row)
      for (size_t column = 0; column < width; ++column)
        columns[column * height + row] = rows[row * width + column];
    first = writer->Append(columns);
  }
  return first;
}

}  // namespace

absl::Status ImportParameters(Engine& engine, const std::string& path,
                              const ImportOptions& options) {
  const bool ours = HasCheckpoints(path);
  absl::StatusOr<std::unique_ptr<TensorSource>> source;
  if (!ours) source = OpenTensorSource(path);
  EBB_RETURN_IF_ERROR(
      engine.Agree(ours ? absl::OkStatus() : source.status(),
                   absl::StrCat("ImportParameters: ", path, ours ? " has checkpoints" : "")));
  ReadAttempt only;
  if (!ours) return ImportFrom(engine, std::move(source), options, only);
  return ReadWholeCheckpoint(engine, path, [&](FoundCheckpoint found, ReadAttempt& attempt) {
    return ImportFrom(engine, OpenWholeCheckpoint(found.path, std::move(found.manifest)), options,
                      attempt);
  });
}

absl::Status ExportParameters(Engine& engine, const std::string& folder,
                              const ExportOptions& options) {
  std::vector<TensorInfo> tensors;
  for (const ParameterSpec& parameter : engine.model().parameters)
    tensors.push_back({.name = parameter.name,
                       .dtype = parameter.compute == DType::kInt8 ? DType::kInt8 : options.dtype,
                       .shape = WholeShape(parameter)});
  std::vector<bool> transposed;
  absl::Status own;
  const bool gpt2 = AreOfGpt2(tensors, options.names, NameDirection::kOutside);
  for (TensorInfo& tensor : tensors) {
    const absl::StatusOr<NameElsewhere> as =
        NameOf(tensor, gpt2, NameDirection::kOutside, "the model");
    own.Update(as.status());
    if (!as.ok()) break;
    tensor.name = as->name;
    transposed.push_back(as->transposed);
    if (as->transposed) std::reverse(tensor.shape.begin(), tensor.shape.end());
  }
  std::unique_ptr<SafetensorsWriter> writer;  // rank 0's
  if (own.ok() && engine.world().rank() == 0) {
    auto made = SafetensorsWriter::Create(folder, tensors, options.file_bytes_max);
    own = made.status();
    if (made.ok()) writer = *std::move(made);
  }
  EBB_RETURN_IF_ERROR(engine.Agree(own, absl::StrCat("ExportParameters: ", folder)));
  own = WriteValues(engine, transposed, writer.get());
  if (own.ok() && writer) {
    for (const auto& [name, text] : options.files)
      if (own.ok()) own = writer->AddFile(name, text);
    if (own.ok()) own = writer->Finish();
  }
  return engine.Agree(own, "ExportParameters: values");
}

absl::Status CheckExports(const std::string& folder) {
  return SafetensorsWriter::CheckFolder(folder);
}

}  // namespace ebb
