#include "ebb/runtime/engine/steps/view_errors.h"

#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// By number. A view may outlive its engine, so an engine's number is never used again.
struct Living {
  std::mutex mutex;
  uint32_t last = 0;
  std::unordered_map<uint32_t, ViewErrors*> engines;
  uint32_t logged = 0;  // pairs of dtypes, of views of no engine: nothing else tells these apart
};

// Never destroyed: threads may hold views when the process ends.
Living& AllLiving() {
  static Living& living = *new Living;
  return living;
}

uint32_t Enter(ViewErrors* errors) {
  Living& living = AllLiving();
  const std::lock_guard lock(living.mutex);
  do ++living.last;
  while (living.last == 0 || living.engines.contains(living.last));
  living.engines.emplace(living.last, errors);
  return living.last;
}

std::string DTypeName(DType dtype) {
  return std::string(Name(dtype));
}

std::string WrongType(const std::string& shown, DType wanted, DType there) {
  const std::string T = wanted == DType::kFloat32    ? "float"
                        : wanted == DType::kBFloat16 ? "BFloat16"
                        : wanted == DType::kFloat16  ? "Float16"
                                                     : "int8_t";
  return absl::StrCat("as<", T, ">() asks for ", DTypeName(wanted), ", but ", shown, " is ",
                      DTypeName(there), ": the span is empty");
}

}  // namespace

void ReportWrongType(const ViewOrigin& origin, DType wanted, DType there) {
  std::string line;
  {
    Living& living = AllLiving();
    const std::lock_guard lock(living.mutex);  // so the engine does not end meanwhile
    const auto found = living.engines.find(origin.engine);
    if (found != living.engines.end()) {
      line = found->second->NoteWrongType(origin.shows, wanted, there);
    } else if (const uint32_t pair = 1u << (4 * static_cast<int>(wanted) + static_cast<int>(there));
               (living.logged & pair) == 0) {
      living.logged |= pair;
      line = WrongType(origin.engine == 0 ? "the trainer's own TensorView"
                                          : "the TensorView of an engine that is gone",
                       wanted, there);
    }
  }
  if (!line.empty()) LogWarning(line);
}

void ReportClosedScope(uint32_t engine, int64_t scope, const char* asked, const ParameterId* of) {
  std::string line;
  {
    Living& living = AllLiving();
    const std::lock_guard lock(living.mutex);
    const auto found = living.engines.find(engine);
    if (found != living.engines.end()) line = found->second->NoteClosedScope(scope, asked, of);
  }
  if (!line.empty()) LogWarning(line);
}

ViewErrors::ViewErrors(std::string speaker, const ModelSpec& model)
    : speaker_(std::move(speaker)), model_(model), number_(Enter(this)) {}

ViewErrors::~ViewErrors() {
  Living& living = AllLiving();
  const std::lock_guard lock(living.mutex);
  living.engines.erase(number_);
}

void ViewErrors::Begin(int64_t last_scope) {
  const std::lock_guard lock(mutex_);
  open_ = true;
  last_scope_ = last_scope;
  logged_ = false;
}

void ViewErrors::End() {
  const std::lock_guard lock(mutex_);
  open_ = false;
}

std::string ViewErrors::NoteWrongType(uint32_t shows, DType wanted, DType there) {
  const Shown what = static_cast<Shown>(shows >> kIndexBits);
  const char* advice = "";
  if (what == Shown::kGradient) {
    advice =
        "; the dtype of gradients follows from the configuration: ask MutableTensorView::dtype, "
        "use "
        "WithNumbers, or state what the trainer takes as ModelSpec::gradient_dtypes";
  } else if (what == Shown::kWorkspace) {
    advice = "; cast its `data`";
  } else if (what == Shown::kParameter) {
    advice =
        "; its dtype is its own (ParameterSpec::compute), else the configuration's: ask "
        "TensorView::dtype, use WithNumbers, or state what the trainer takes as "
        "ModelSpec::compute_dtypes";
  } else if (what != Shown::kLossScale) {
    advice =
        "; its dtype is the configuration's: ask TensorView::dtype, use WithNumbers, or state what "
        "the trainer takes as ModelSpec::compute_dtypes";
  }
  return Note(
      absl::InvalidArgumentError(absl::StrCat(WrongType(NameOf(shows), wanted, there), advice)));
}

std::string ViewErrors::NoteClosedScope(int64_t scope, const char* asked, const ParameterId* of) {
  {
    const std::lock_guard lock(mutex_);
    if (!open_ || scope <= last_scope_) return "";
  }
  std::string what = asked;
  if (of != nullptr && static_cast<size_t>(*of) < model_.parameters.size())
    absl::StrAppend(&what, " of parameter '", model_[*of].name, "'");
  return Note(absl::FailedPreconditionError(absl::StrCat(
      what, " asked of a scope that is closed, or was moved from: the result is empty")));
}

std::string ViewErrors::Note(absl::Status mistake) {
  const std::lock_guard lock(mutex_);
  std::string line;
  if (!std::exchange(logged_, true) && last_logged_ != mistake.message()) {
    last_logged_ = std::string(mistake.message());
    line = absl::StrCat(speaker_, ": ", last_logged_);
  }
  if (first_.ok()) {
    first_ = std::move(mistake);
    any_.store(true, std::memory_order_release);
  }
  return line;
}

absl::Status ViewErrors::Take() {
  if (!any()) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  any_.store(false, std::memory_order_relaxed);
  return std::exchange(first_, absl::OkStatus());
}

std::string ViewErrors::NameOf(uint32_t shows) const {
  const size_t index = shows & ((1u << kIndexBits) - 1);
  const auto parameter = [&] {
    return absl::StrCat("parameter '", model_.parameters[index].name, "'");
  };
  const auto boundary = [&](const char* which) {
    const UnitId unit = model_.forward[index].unit;
    return absl::StrCat("the ", which, " of unit '", model_[unit].name, "' in visit ", index);
  };
  switch (static_cast<Shown>(shows >> kIndexBits)) {
    case Shown::kParameter:
      return parameter();
    case Shown::kGradient:
      return absl::StrCat("the gradient of ", parameter());
    case Shown::kInput:
      return boundary("input");
    case Shown::kOutput:
      return boundary("output");
    case Shown::kOutputGradient:
      return boundary("output gradient");
    case Shown::kInputGradient:
      return boundary("input gradient");
    case Shown::kWorkspace:
      return "the workspace";
    case Shown::kLossScale:
      return "the loss scale";
  }
  return "";
}

}  // namespace ebb
