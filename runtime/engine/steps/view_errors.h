// A trainer's mistakes with views: the wrong type, another unit's parameter, a closed scope.
// TensorView::as<T>() may be called on any thread, at any time, even after the scope or the engine
// is gone. So a view carries numbers (ViewOrigin), and as<T>() finds this object by them while it
// lives. The engine takes the first mistake whenever its step may still be stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/engine/tensor_view.h"
#include "ebb/sharding/model.h"

namespace ebb {

enum class Shown : uint8_t {
  kParameter,  // by number
  kGradient,
  kInput,  // by visit
  kOutput,
  kOutputGradient,
  kInputGradient,
  kWorkspace,
  kLossScale,
};

class ViewErrors {
 public:
  // `speaker`: the beginning of a line of the log. The model outlives this object.
  ViewErrors(std::string speaker, const ModelSpec& model);
  ~ViewErrors();  // afterwards no view finds it
  ViewErrors(const ViewErrors&) = delete;
  ViewErrors& operator=(const ViewErrors&) = delete;

  ViewOrigin Of(Shown what, int index = 0) const {
    return {.engine = number_,
            .shows = static_cast<uint32_t>(what) << kIndexBits | static_cast<uint32_t>(index)};
  }

  uint32_t number() const { return number_; }

  // A step or an evaluation begins: its first mistake is logged again, unless it was logged last.
  // `last_scope`: the number of the last scope opened before.
  void Begin(int64_t last_scope);
  void End();
  // Any thread. The first mistake since Take is kept. Returns the line to log, or "".
  std::string NoteWrongType(uint32_t shows, DType wanted, DType there);
  std::string NoteClosedScope(int64_t scope, const char* asked, const ParameterId* of);
  std::string Note(absl::Status mistake);
  bool any() const { return any_.load(std::memory_order_acquire); }
  absl::Status Take();

 private:
  static constexpr int kIndexBits = 28;
  std::string NameOf(uint32_t shows) const;

  const std::string speaker_;
  const ModelSpec& model_;
  const uint32_t number_;
  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  bool open_ = false;  // a step or an evaluation is
  int64_t last_scope_ = 0;
  bool logged_ = false;  // a mistake of this step
  std::string last_logged_;
  absl::Status first_;
};

// A request for a view of a scope of the open step after its Close or move. After the end of the
// step or engine nothing is reported: views are empty, as scope.h says.
void ReportClosedScope(uint32_t engine, int64_t scope, const char* asked, const ParameterId* of);

}  // namespace ebb
