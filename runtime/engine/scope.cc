#include "ebb/runtime/engine/scope.h"

#include <utility>

#include "ebb/runtime/engine/executor.h"

namespace ebb {

Scope& Scope::operator=(Scope&& other) noexcept {
  if (this == &other) return *this;
  Close();
  executor_ = std::exchange(other.executor_, nullptr);
  id_ = other.id_;
  return *this;
}

TensorView Scope::parameter(ParameterId p) const {
  return executor_ == nullptr ? TensorView{} : executor_->Parameter(id_, p);
}

std::span<const int> Scope::micro_batches() const {
  return executor_ == nullptr ? std::span<const int>{} : executor_->MicroBatches(id_);
}

TensorView Scope::input(int micro_batch) const {
  return executor_ == nullptr ? TensorView{} : TensorView(executor_->Input(id_, micro_batch));
}

void Scope::Close() {
  if (executor_ != nullptr) std::exchange(executor_, nullptr)->Close(id_);
}

MutableTensorView ForwardScope::output(int micro_batch) {
  return executor_ == nullptr ? MutableTensorView{} : executor_->Output(id_, micro_batch);
}

MutableTensorView BackwardScope::gradient(ParameterId p) {
  return executor_ == nullptr ? MutableTensorView{}
                              : executor_->Gradient(id_, p, /*zero_fill=*/true).tensor;
}

BackwardScope::Fused BackwardScope::fused_gradient(ParameterId p) {
  return executor_ == nullptr ? Fused{} : executor_->Gradient(id_, p, /*zero_fill=*/false);
}

TensorView BackwardScope::output_gradient(int micro_batch) const {
  return executor_ == nullptr ? TensorView{}
                              : TensorView(executor_->OutputGradient(id_, micro_batch));
}

MutableTensorView BackwardScope::input_gradient(int micro_batch) {
  return executor_ == nullptr ? MutableTensorView{} : executor_->InputGradient(id_, micro_batch);
}

}  // namespace ebb
