#include "ebb/runtime/engine/scope.h"

#include <utility>

#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/engine/view_errors.h"

namespace ebb {

Scope& Scope::operator=(Scope&& other) noexcept {
  if (this == &other) return *this;
  Close();
  executor_ = std::exchange(other.executor_, nullptr);
  id_ = other.id_;
  engine_ = other.engine_;
  return *this;
}

bool Scope::IsOpen(const char* asked, const ParameterId* of) const {
  if (executor_ == nullptr && id_ != 0) ReportClosedScope(engine_, id_, asked, of);
  return executor_ != nullptr;
}

TensorView Scope::parameter(ParameterId p) const {
  return IsOpen("parameter()", &p) ? executor_->Parameter(id_, p) : TensorView{};
}

std::span<const int> Scope::micro_batches() const {
  return IsOpen("micro_batches()") ? executor_->MicroBatches(id_) : std::span<const int>{};
}

TensorView Scope::input(int micro_batch) const {
  return IsOpen("input()") ? TensorView(executor_->Input(id_, micro_batch)) : TensorView{};
}

void Scope::Close() {
  if (executor_ != nullptr) std::exchange(executor_, nullptr)->Close(id_);
}

MutableTensorView ForwardScope::output(int micro_batch) {
  return IsOpen("output()") ? executor_->Output(id_, micro_batch) : MutableTensorView{};
}

MutableTensorView BackwardScope::gradient(ParameterId p) {
  return IsOpen("gradient()", &p) ? executor_->Gradient(id_, p, /*zero_fill=*/true).tensor
                                  : MutableTensorView{};
}

BackwardScope::Fused BackwardScope::fused_gradient(ParameterId p) {
  return IsOpen("fused_gradient()", &p) ? executor_->Gradient(id_, p, /*zero_fill=*/false)
                                        : Fused{};
}

TensorView BackwardScope::output_gradient(int micro_batch) const {
  return IsOpen("output_gradient()") ? TensorView(executor_->OutputGradient(id_, micro_batch))
                                     : TensorView{};
}

MutableTensorView BackwardScope::input_gradient(int micro_batch) {
  return IsOpen("input_gradient()") ? executor_->InputGradient(id_, micro_batch)
                                    : MutableTensorView{};
}

}  // namespace ebb
