#include "ebb/runtime/checkpoint/universal_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/raw_tensors.h"
#include "ebb/runtime/checkpoint/torch_file.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr char kZero[] = "zero", kLatestUniversal[] = "latest_universal",
               kOptimizerState[] = "optimizer_state.pt", kValueFile[] = "fp32.pt",
               kStepFile[] = "step.pt", kParam[] = "param";
constexpr std::string_view kModelStates = "_model_states.pt", kOptimStates = "_optim_states.pt",
                           kTorchEnding = ".pt";
constexpr int64_t kNameBytesMax = 4096;
constexpr double kStepsMax = 1e15;

// The names in a folder, sorted, so that the same folder gives the same source on every rank.
absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) return FileError("reading", folder, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

// Whether the path is a folder and not a link, because links are not followed.
bool IsFolder(const std::string& path) {
  std::error_code error;
  return fs::is_directory(fs::symlink_status(path, error));
}

// The facts from the files beside the parameters.
struct Facts {
  std::map<std::string, std::vector<int64_t>> shapes;  // of trained parameters
  std::set<std::string> buffers;
  std::map<std::string, std::string> tied;  // to the name that has the values
  std::optional<int64_t> finished, skipped, applied;
  optim::LossScalerState scaler;
};

class UniversalFolder {
 public:
  explicit UniversalFolder(std::string path)
      : path_(std::move(path)),
        tensors_(std::make_unique<RawTensors>(
            SourceDescription{.kind = "universal checkpoint of DeepSpeed", .path = path_})) {}

  absl::StatusOr<std::unique_ptr<TensorSource>> Open() {
    const std::string zero = absl::StrCat(path_, "/", kZero);
    if (!IsFolder(zero)) return Refuse(zero, "is not a folder, or a link, which is not followed");
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> beside, NamesIn(path_));
    for (const std::string& name : beside)
      if (name.ends_with(kModelStates)) model_states_.push_back(absl::StrCat(path_, "/", name));
    if (!model_states_.empty()) EBB_RETURN_IF_ERROR(ReadModelStates());
    const std::string optimizer = absl::StrCat(zero, "/", kOptimizerState);
    if (IsThere(optimizer)) EBB_RETURN_IF_ERROR(ReadOptimizerState(optimizer));
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> parameters, NamesIn(zero));
    for (const std::string& name : parameters) {
      const std::string folder = absl::StrCat(zero, "/", name);
      if (IsFolder(folder)) {
        EBB_RETURN_IF_ERROR(AddParameter(name, folder));
      } else if (name != kOptimizerState) {
        return Refuse(folder, "is neither a parameter's folder nor a known file");
      }
    }
    if (!model_states_.empty()) EBB_RETURN_IF_ERROR(AddFrozen());
    EBB_RETURN_IF_ERROR(SetState());
    return std::move(tensors_);
  }

 private:
  static absl::Status Refuse(const std::string& path, std::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' ", std::string(what)));
  }

  // Each model states file has the same facts, so one is read. AddFrozen reads the tensors.
  absl::Status ReadModelStates() {
    EBB_ASSIGN_OR_RETURN(const TorchFile file,
                         TorchFile::Open(model_states_.front(), TorchGlobals::kAny));
    const Pickle& pickle = file.pickle();
    const PickleValue& root = pickle.root();
    // A dict, or a list of one for each group of the optimizer.
    if (const PickleValue* const shapes = pickle.Find(root, "param_shapes")) {
      if (IsDict(*shapes)) EBB_RETURN_IF_ERROR(AddShapes(file, *shapes, facts_.shapes));
      if (shapes->kind == Kind::kList || shapes->kind == Kind::kTuple)
        for (const uint32_t group : shapes->items)
          EBB_RETURN_IF_ERROR(AddShapes(file, pickle[group], facts_.shapes));
    }
    if (const PickleValue* const names = pickle.Find(root, "buffer_names"))
      if (names->kind == Kind::kList)
        for (const uint32_t name : names->items) facts_.buffers.insert(pickle[name].text);
    if (const PickleValue* const tied = pickle.Find(root, "shared_params"); tied && IsDict(*tied))
      for (size_t i = 0; i + 1 < tied->items.size(); i += 2)
        facts_.tied[pickle[tied->items[i]].text] = pickle[tied->items[i + 1]].text;
    const auto count = [&](std::string_view key) -> std::optional<int64_t> {
      const PickleValue* const value = pickle.Find(root, key);
      if (value == nullptr || value->kind != Kind::kInt) return std::nullopt;
      return value->integer;
    };
    facts_.finished = count("global_steps");
    facts_.skipped = count("skipped_steps");
    return absl::OkStatus();
  }

  static absl::Status AddShapes(const TorchFile& file, const PickleValue& dict,
                                std::map<std::string, std::vector<int64_t>>& shapes) {
    if (!IsDict(dict)) return absl::OkStatus();
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      const std::string& name = file.pickle()[dict.items[i]].text;
      EBB_ASSIGN_OR_RETURN(shapes[name], file.SizesOf(file.pickle()[dict.items[i + 1]], name));
    }
    return absl::OkStatus();
  }

  absl::Status ReadOptimizerState(const std::string& path) {
    EBB_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(path, TorchGlobals::kAny));
    const Pickle& pickle = file.pickle();
    const PickleValue& root = pickle.root();
    // DeepSpeed's scaler is an object. Its members are a dict.
    const PickleValue* const scaler = pickle.Find(root, "loss_scaler");
    if (scaler != nullptr && scaler->kind == Kind::kObject && scaler->has_state) {
      const PickleValue& members = pickle[scaler->state];
      const auto number = [&](std::string_view key, double otherwise) {
        const PickleValue* const value = pickle.Find(members, key);
        return value == nullptr ? otherwise : file.NumberOf(*value, key).value_or(otherwise);
      };
      const auto steps = [&](double value) {
        return value > 0 && value < kStepsMax ? static_cast<int64_t>(value) : 0;
      };
      facts_.scaler.scale = number("cur_scale", 1);
      // The step after an overflow is not part of the window yet.
      facts_.scaler.clean_steps =
          steps(number("cur_iter", 0) - number("last_overflow_iter", -1) - 1);
      facts_.scaler.hysteresis_left = steps(number("cur_hysteresis", 0));
    }
    // At stage 3 all parameters of an optimizer's group have one count.
    const PickleValue* const inner = pickle.Find(root, "optimizer_state_dict");
    const PickleValue* const groups = inner == nullptr ? nullptr : pickle.Find(*inner, "state");
    if (groups != nullptr && IsDict(*groups)) {
      for (size_t i = 1; i < groups->items.size(); i += 2)
        if (const PickleValue* const step = pickle.Find(pickle[groups->items[i]], "step"))
          EBB_RETURN_IF_ERROR(AddStep(file, *step, path));
    }
    return absl::OkStatus();
  }

  // All parameters must have the same step, because Ebb's optimizers have one count.
  absl::Status AddStep(const TorchFile& file, const PickleValue& value, const std::string& path) {
    EBB_ASSIGN_OR_RETURN(const double step, file.NumberOf(value, "step"));
    if (!(step >= 0 && step < kStepsMax) || step != std::floor(step))
      return Refuse(path, absl::StrCat("has the step ", step, ", which is not a count"));
    const int64_t steps = static_cast<int64_t>(step);
    if (facts_.applied.value_or(steps) != steps) {
      return Refuse(path, absl::StrCat("says ", steps, " steps, but another file says ",
                                       *facts_.applied, ": all parameters must have one count"));
    }
    facts_.applied = steps;
    return absl::OkStatus();
  }

  absl::Status AddParameter(const std::string& name, const std::string& folder) {
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> files, NamesIn(folder));
    for (const std::string& file : files) {
      if (file.find_first_not_of("0123456789") == std::string::npos)
        return Refuse(folder,
                      "has slices of tensor-parallel ranks, which ds_to_universal.py has not "
                      "merged: convert the run's checkpoint again");
      if (!file.ends_with(kTorchEnding) || file.size() == kTorchEnding.size())
        return Refuse(absl::StrCat(folder, "/", file), "is not a file of a parameter");
    }
    if (std::find(files.begin(), files.end(), kValueFile) == files.end())
      return Refuse(folder, absl::StrCat("lacks ", kValueFile, ", the parameter's values"));
    seen_.insert(name);
    if (facts_.buffers.contains(name)) {
      tensors_->LeaveOut(name, "a buffer");
      return absl::OkStatus();
    }
    if (const auto tied = facts_.tied.find(name); tied != facts_.tied.end()) {
      tensors_->LeaveOut(name, absl::StrCat("tied to ", config::Shortened(tied->second)));
      return absl::OkStatus();
    }
    EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> shape,
                         AddTensor(name, "", absl::StrCat(folder, "/", kValueFile), nullptr));
    for (const std::string& file : files) {
      const std::string path = absl::StrCat(folder, "/", file);
      if (file == kValueFile) continue;
      if (file == kStepFile) {
        EBB_ASSIGN_OR_RETURN(const TorchFile step, TorchFile::Open(path, TorchGlobals::kOfTensors));
        EBB_RETURN_IF_ERROR(AddStep(step, step.pickle().root(), path));
        continue;
      }
      has_states_ = true;
      const std::string state = file.substr(0, file.size() - kTorchEnding.size());
      EBB_RETURN_IF_ERROR(AddTensor(name, state, path, &shape).status());
    }
    return absl::OkStatus();
  }

  // Adds the tensor and returns its shape. `wanted`: the shape of the values, which a state must
  // have, too.
  absl::StatusOr<std::vector<int64_t>> AddTensor(const std::string& name, const std::string& state,
                                                 const std::string& path,
                                                 const std::vector<int64_t>* wanted) {
    EBB_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(path, TorchGlobals::kOfTensors));
    const PickleValue* value = &file.pickle().root();
    const bool flat = TorchFile::IsTensor(*value);
    if (!flat) value = file.pickle().Find(*value, kParam);
    if (value == nullptr)
      return Refuse(path, absl::StrCat("is neither a tensor nor a dict with \"", kParam, "\""));
    EBB_ASSIGN_OR_RETURN(const TorchTensor tensor, file.TensorOf(*value, kParam));
    if (!tensor.dtype)
      return Refuse(
          path, absl::StrCat("has numbers of ", tensor.storage, "; fp32, bf16 and fp16 are read"));
    std::vector<int64_t> shape = tensor.shape;
    if (flat) {
      const auto known = facts_.shapes.find(name);
      if (known == facts_.shapes.end()) {
        return Refuse(path,
                      absl::StrCat("is a flat tensor, as of stage 3, and \"param_shapes\" of ",
                                   "a *_model_states.pt does not have its shape"));
      }
      shape = known->second;
      if (Elements(shape) != Elements(tensor.shape)) return OtherShape(path, tensor.shape, shape);
    }
    if (wanted != nullptr && shape != *wanted) return OtherShape(path, shape, *wanted);
    tensors_->BeginFile(path);
    tensors_->Add({.name = name, .state = state, .dtype = *tensor.dtype, .shape = shape},
                  tensor.at);
    return shape;
  }
  static absl::Status OtherShape(const std::string& path, const std::vector<int64_t>& is,
                                 const std::vector<int64_t>& wanted) {
    return absl::DataLossError(absl::StrCat("'", path, "' has the shape ", ShapeText(is),
                                            ", its parameter ", ShapeText(wanted)));
  }

  // Frozen parameters are in a model states file: whole in `module`, or, at stage 3, as each rank's
  // flat piece.
  absl::Status AddFrozen() {
    const std::string& path = model_states_.front();
    EBB_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(path, TorchGlobals::kAny));
    const Pickle& pickle = file.pickle();
    const PickleValue* const pieces = pickle.Find(pickle.root(), "frozen_param_fragments");
    const bool flat = pieces != nullptr && IsDict(*pieces);
    const PickleValue* const dict = flat ? pieces : pickle.Find(pickle.root(), "module");
    if (dict == nullptr || !IsDict(*dict)) return absl::OkStatus();
    std::map<std::string, std::vector<int64_t>> shapes;
    if (const PickleValue* const known = pickle.Find(pickle.root(), "frozen_param_shapes"))
      EBB_RETURN_IF_ERROR(AddShapes(file, *known, shapes));
    tensors_->BeginFile(path);
    for (size_t i = 0; i + 1 < dict->items.size(); i += 2) {
      const PickleValue& value = pickle[dict->items[i + 1]];
      const std::string& name = pickle[dict->items[i]].text;
      if (name.empty() || facts_.buffers.contains(name) || facts_.tied.contains(name) ||
          !TorchFile::IsTensor(value) || !seen_.insert(name).second)
        continue;
      if (model_states_.size() > 1) {
        tensors_->LeaveOut(name, "in pieces, in several *_model_states.pt");
        continue;
      }
      EBB_ASSIGN_OR_RETURN(const TorchTensor tensor, file.TensorOf(value, name));
      const auto known = shapes.find(name);
      const std::vector<int64_t>& shape = known == shapes.end() ? tensor.shape : known->second;
      if (!tensor.dtype || Elements(shape) == 0 || Elements(shape) > Elements(tensor.shape)) {
        tensors_->LeaveOut(name, "no parameter with complete values");
        continue;
      }
      tensors_->Add({.name = name, .dtype = *tensor.dtype, .shape = shape}, tensor.at);
    }
    return absl::OkStatus();
  }

  absl::Status SetState() {
    const int64_t skipped = facts_.skipped.value_or(0);
    if (!facts_.applied && facts_.finished) facts_.applied = *facts_.finished - skipped;
    if (!facts_.applied && has_states_) {
      return Refuse(path_,
                    "has optimizer states, but no number of steps: step.pt, optimizer_state.pt "
                    "or a *_model_states.pt must have it");
    }
    const int64_t applied = facts_.applied.value_or(0);
    TrainingState state = {
        .applied_steps = applied, .skipped_steps = skipped, .loss_scaler = facts_.scaler};
    if (__builtin_add_overflow(applied, skipped, &state.finished_steps) || !Validate(state).ok()) {
      return Refuse(
          path_, absl::StrCat("says ", applied, " steps, ", skipped, " skipped and the loss scale ",
                              facts_.scaler.scale, ", which is impossible"));
    }
    tensors_->SetState(state);
    return absl::OkStatus();
  }

  const std::string path_;
  std::vector<std::string> model_states_;  // paths
  Facts facts_;
  std::set<std::string> seen_;
  bool has_states_ = false;
  std::unique_ptr<RawTensors> tensors_;
};

}  // namespace

bool HasUniversalFolder(const std::string& path) {
  return IsThere(absl::StrCat(path, "/", kZero)) ||
         IsThere(absl::StrCat(path, "/", kLatestUniversal));
}

bool LooksLikeDeepSpeed(const std::string& path) {
  if (IsThere(absl::StrCat(path, "/zero_to_fp32.py"))) return true;
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(path);
  return names.ok() && std::any_of(names->begin(), names->end(), [](const std::string& name) {
           return name.ends_with(kOptimStates);
         });
}

absl::StatusOr<std::unique_ptr<TensorSource>> OpenUniversalFolder(const std::string& path) {
  const std::string latest = absl::StrCat(path, "/", kLatestUniversal);
  if (IsThere(absl::StrCat(path, "/", kZero)) || !IsThere(latest))
    return UniversalFolder(path).Open();
  EBB_ASSIGN_OR_RETURN(std::string name, ReadWholeFile(latest, kNameBytesMax));
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos)
    return absl::DataLossError(absl::StrCat("'", latest, "' has ", config::Quoted(name),
                                            ", not the plain name of a folder beside it"));
  const std::string folder = absl::StrCat(path, "/", name);
  if (!IsFolder(folder))
    return absl::NotFoundError(
        absl::StrCat("'", latest, "' names '", folder, "', which is not a folder"));
  return UniversalFolder(folder).Open();
}

}  // namespace ebb
