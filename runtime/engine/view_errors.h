// The mistakes that a trainer makes with views: the wrong type, another unit's parameter, a scope that is
// closed. TensorView::as<T>() may be called on any thread, at any time, also after the scope or the engine
// is gone. So a view carries numbers (ViewOrigin), by which as<T>() finds this object as long as it lives.
// The engine takes the first mistake wherever its step may still be stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "ebb/runtime/config/dtype.h"
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
  // `speaker`: what a line of the log begins with. The model outlives this object.
  ViewErrors(std::string speaker, const ModelSpec& model);
  ~ViewErrors();  // from here on no view finds it
  ViewErrors(const ViewErrors&) = delete;
  ViewErrors& operator=(const ViewErrors&) = delete;

  ViewOrigin Of(Shown what, int index = 0) const {
    return {.engine = number_,
            .shows = static_cast<uint32_t>(what) << kIndexBits | static_cast<uint32_t>(index)};
  }

  uint32_t number() const { return number_; }

  // A step or an evaluation begins: its first mistake is logged again, unless it is the one that was
  // logged last. `last_scope`: the last scope, by number, that was opened before it.
  void Begin(int64_t last_scope);
  void End();
  // Any thread. The first since Take is kept. Returned is the line to log, or "".
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
  bool logged_ = false;  // something of this step
  std::string last_logged_;
  absl::Status first_;
};

// A view asked of a scope of the open step after its Close, or of one that was moved from. After the
// end of its step or engine nothing is said: the scope gives empty views, as scope.h states.
void ReportClosedScope(uint32_t engine, int64_t scope, const char* asked, const ParameterId* of);

}  // namespace ebb
